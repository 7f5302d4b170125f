"""deploy/kubernetes as `kubectl kustomize` would render it, checked against Kubernetes' own schemas, how its containers and
those of deploy/compose.yaml are started, and what compose's observability is given: `manifests.py DEPLOY_FOLDER`.

Only what these files use of Kustomize is known here: resources, components, JSON patches and the secret generator. Prints
the command lines as JSON; whoever calls this knows whether the services understand them.
"""
import copy
import json
import shlex
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

VERSION = "1.34"
# Of a controller of its own, with a schema of its own here; its pods are checked as pods.
LEADER_WORKER_SET = json.loads((Path(__file__).parent / "leader-worker-set.schema.json").read_text())


def documents(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def matches(target, resource):
    kind, name = resource["kind"], resource["metadata"]["name"]
    return target.get("kind", kind) == kind and target.get("name", name) == name


def apply(resource, operation):
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    at = resource
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    value = copy.deepcopy(operation["value"])
    if isinstance(at, list):
        if last == "-":
            at.append(value)
        elif operation["op"] == "replace":
            at[int(last)] = value
        else:
            at.insert(int(last), value)
    else:
        assert operation["op"] != "replace" or last in at, f"nothing to replace at {operation['path']}"
        at[last] = value


def render(folder, resources=None):
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    resources = [] if resources is None else resources
    for name in kustomization.get("resources", []):
        path = folder / name
        resources += render(path) if path.is_dir() else documents(path)
    for generated in kustomization.get("secretGenerator", []):
        data = dict(literal.split("=", 1) for literal in generated["literals"])
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": generated["name"]}, "stringData": data}
        resources.append(secret)
    for name in kustomization.get("components", []):
        render(folder / name, resources)
    for patch in kustomization.get("patches", []):
        targets = [resource for resource in resources if matches(patch["target"], resource)]
        assert targets, f"{folder.name}: a patch has no target: {patch['target']}"
        for resource in targets:
            for operation in yaml.safe_load(patch["patch"]):
                apply(resource, operation)
    return resources


def pod_of(resource):
    spec = resource.get("spec", {})
    if resource["kind"] == "LeaderWorkerSet":
        return spec["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    return spec.get("template", {}).get("spec")


def validate(resource):
    if resource["kind"] == "LeaderWorkerSet":
        jsonschema.validate(resource, LEADER_WORKER_SET)
        template = resource["spec"]["leaderWorkerTemplate"]
        for role in ("leaderTemplate", "workerTemplate"):
            if role in template:
                metadata = {"name": "pod"} | template[role].get("metadata", {})
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template[role]["spec"]}
                kubernetes_validate.validate(pod, VERSION, strict=True)
    else:
        kubernetes_validate.validate(resource, VERSION, strict=True)


def check_pod(where, pod):
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and pod["automountServiceAccountToken"] is False, where
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] and own["capabilities"] == {"drop": ["ALL"]}, where
        assert {"startupProbe", "livenessProbe", "readinessProbe", "resources"} <= container.keys(), where
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, where
        yield where, container


def started(container):
    words = container["args"]
    if container.get("command") == ["/bin/sh", "-c"]:
        words = shlex.split(words[0].removeprefix("exec ").replace("$$((GROUP * LWS_GROUP_SIZE + LWS_WORKER_INDEX))", "3"))[1:]
        words = [word.replace("$LWS_WORKER_INDEX/$LWS_GROUP_SIZE", "1/2") for word in words]
    values = {"RANK": "1", "SHARDS": "2", "POD_NAME": "pod-1"}
    for name, value in values.items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words


def check_observability(deploy, services):
    """What Jaeger, Prometheus and Grafana are given: every file is there and lies where another one looks for it, every
    name is a service's."""
    at = {}  # what is mounted where
    for name in ("jaeger", "prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            source, target, mode = volume.rsplit(":", 2)
            assert mode == "ro" and (deploy / source).is_file(), f"{name}: {volume}"
            at[name, target] = deploy / source

    targets = yaml.safe_load(at["prometheus", "/etc/prometheus/prometheus.yaml"].read_text())
    for rules in targets["rule_files"]:
        assert ("prometheus", f"/etc/prometheus/{rules}") in at, f"prometheus: {rules}"
    for job in targets["scrape_configs"]:
        secret = job["authorization"]["credentials_file"].removeprefix("/run/secrets/")
        assert secret in services["prometheus"]["secrets"], f"prometheus: {secret}"
        for address in job["static_configs"][0]["targets"]:
            host, port = address.split(":")
            assert f"--listen=0.0.0.0:{port}" in services[host]["command"], f"prometheus: {address}"

    provided = yaml.safe_load(at["grafana", "/etc/grafana/provisioning/datasources/afd.yaml"].read_text())
    sources = {source["type"]: source["url"] for source in provided["datasources"]}
    for url in sources.values():
        host, port = url.removeprefix("http://").split(":")
        assert services[host]["ports"][0].endswith(f":{port}"), f"grafana: {url}"
    provider = yaml.safe_load(at["grafana", "/etc/grafana/provisioning/dashboards/afd.yaml"].read_text())["providers"][0]
    dashboard = json.loads(at["grafana", f"{provider['options']['path']}/afd.json"].read_text())
    variables = {variable["name"]: variable["query"] for variable in dashboard["templating"]["list"]}
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            source = panel["datasource"]
            assert source["type"] in sources, f"grafana: {panel['title']}"
            assert variables[source["uid"].strip("${}")] == source["type"], f"grafana: {panel['title']}"


def main():
    deploy = Path(sys.argv[1])
    kubernetes = deploy / "kubernetes"
    lines = []
    rendered = {folder.parent.name: render(folder.parent) for folder in sorted(kubernetes.glob("*/kustomization.yaml"))
                if yaml.safe_load(folder.read_text())["kind"] == "Kustomization"}
    rendered["leader-worker-set"] = documents(kubernetes / "leader-worker-set.yaml")
    for overlay, resources in rendered.items():
        for resource in resources:
            where = f"{overlay}: {resource['kind']} {resource['metadata']['name']}"
            try:
                validate(resource)
            except (kubernetes_validate.ValidationError, jsonschema.ValidationError) as error:
                sys.exit(f"{where}: {'.'.join(map(str, error.path))}: {error.message}")
            pod = pod_of(resource)
            for where, container in check_pod(where, pod) if pod else []:
                lines.append({"where": where, "role": container["name"], "words": started(container)})
    services = yaml.safe_load((deploy / "compose.yaml").read_text())["services"]
    check_observability(deploy, services)
    for name, service in services.items():
        role = name.split("-")[0]
        if role in ("attention", "ffn"):
            assert service["read_only"] and service["cap_drop"] == ["ALL"], name
            words = [word.replace("${AFD_MODEL_NAME:-model}", "m").replace("${AFD_THREADS:-2}", "2") for word in service["command"]]
            lines.append({"where": f"compose: {name}", "role": role, "words": words})
    json.dump(lines, sys.stdout)


if __name__ == "__main__":
    main()
