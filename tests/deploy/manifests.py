"""deploy/kubernetes as `kubectl kustomize` would render it, checked against Kubernetes' own schemas, and how its containers
and those of deploy/compose.yaml are started: `manifests.py DEPLOY_FOLDER`.

Only what these files use of Kustomize is known here: resources, components, JSON patches and the secret generator. Prints
the command lines as JSON; whoever calls this knows whether the services understand them.
"""
import copy
import json
import shlex
import sys
from pathlib import Path

import kubernetes_validate
import yaml

VERSION = "1.34"
UNKNOWN = {"LeaderWorkerSet"}  # of a controller of its own; its pods are checked as pods


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
            if resource["kind"] in UNKNOWN:
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": resource["metadata"], "spec": pod_of(resource)}
                kubernetes_validate.validate(pod, VERSION, strict=True)
            else:
                try:
                    kubernetes_validate.validate(resource, VERSION, strict=True)
                except kubernetes_validate.ValidationError as error:
                    sys.exit(f"{where}: {'.'.join(map(str, error.path))}: {error.message}")
            pod = pod_of(resource)
            for where, container in check_pod(where, pod) if pod else []:
                lines.append({"where": where, "role": container["name"], "words": started(container)})
    for name, service in yaml.safe_load((deploy / "compose.yaml").read_text())["services"].items():
        role = name.split("-")[0]
        if role in ("attention", "ffn"):
            assert service["read_only"] and service["cap_drop"] == ["ALL"], name
            words = [word.replace("${AFD_MODEL_NAME:-model}", "m").replace("${AFD_THREADS:-2}", "2") for word in service["command"]]
            lines.append({"where": f"compose: {name}", "role": role, "words": words})
    json.dump(lines, sys.stdout)


if __name__ == "__main__":
    main()
