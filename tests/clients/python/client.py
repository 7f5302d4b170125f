"""A Python client of both services: health, model info, a streamed completion, a refusal, one FFN layer.

    python client.py --attention 127.0.0.1:8000 --ffn 127.0.0.1:8100

README.md one folder up says how `gen/` is made.
"""

import argparse
import array
import json
import pathlib
import sys

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

sys.path.insert(0, str(pathlib.Path(__file__).parent / "gen"))
from afd.v1 import inference_pb2 as inference  # noqa: E402
from afd.v1 import inference_pb2_grpc, layer_stage_pb2_grpc, tensor_pb2  # noqa: E402
from afd.v1 import layer_stage_pb2 as layer_stage  # noqa: E402

SECONDS = 30  # A deadline for every call: gRPC has none of its own.


def check_health(channel: grpc.Channel, role: str) -> None:
    """`ready` follows readiness, `live` only says that the process is worth keeping; "" stands for `ready`."""
    request = health_pb2.HealthCheckRequest(service="ready")
    status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=SECONDS).status
    print(f"health: {role} {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}")


def list_services(channel: grpc.Channel, role: str) -> None:
    """Reflection: what a server offers, without a .proto at hand."""
    names = ProtoReflectionDescriptorDatabase(channel).get_services()
    print(f"services: {role} {' '.join(sorted(names))}")


def show_model(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    info = stub.GetModelInfo(inference.GetModelInfoRequest(), timeout=SECONDS)
    model = info.model
    print(f"model: {info.name}, {model.architecture}, {model.num_layers} layers of {model.hidden_size}")
    for peer in info.ffn_peers:
        print(f"ffn: {peer.address} has shard {peer.shard.index} of {peer.shard.count}, over {peer.link}")


def stream_completion(stub: inference_pb2_grpc.InferenceServiceStub, prompt: str, max_tokens: int) -> None:
    """Text arrives in pieces; the last message says why it ended. Leaving the loop early cancels the request."""
    request = inference.GenerateRequest(
        text=prompt,
        sampling=inference.SamplingParams(temperature=0.0),
        stop=inference.StopConditions(max_tokens=max_tokens),
    )
    print("completion: ", end="")
    for piece in stub.Generate(request, timeout=SECONDS):
        print(piece.text, end="", flush=True)
        if piece.finish_reason:
            reason = inference.FinishReason.Name(piece.finish_reason)
            print(f"\nfinished: {reason}, {piece.usage.completion_tokens} tokens")


def show_refusal(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """A bad field comes back as INVALID_ARGUMENT; google.rpc.BadRequest among the details names it."""
    request = inference.GenerateRequest(text="Hello", stop=inference.StopConditions(max_tokens=0))
    try:
        for _ in stub.Generate(request, timeout=SECONDS):
            raise AssertionError("max_tokens = 0 was not refused")
    except grpc.RpcError as error:
        fields = []
        for detail in rpc_status.from_call(error).details:
            bad_request = error_details_pb2.BadRequest()
            if detail.Unpack(bad_request):
                fields += [violation.field for violation in bad_request.field_violations]
        print(f"refused: {error.code().name}, field {' '.join(fields)}: {error.details()}")


def run_layer(stub: layer_stage_pb2_grpc.LayerStageServiceStub, reference: dict | None) -> None:
    """Rows go to one layer's FFN and come back: as many, as wide. With several shards each gives a partial sum."""
    described = stub.Describe(layer_stage.DescribeRequest(), timeout=SECONDS)
    width = described.model.hidden_size
    if reference is None:
        reference = {"layer": 0, "shape": [2, width], "input": [0.5] * 2 * width, "output": None}
    spec = described.layers[reference["layer"]]
    if len(spec.inputs) > 1:
        sys.exit(f"layer {spec.layer} also takes {', '.join(i.name for i in spec.inputs[1:])}: not in this example")
    request = layer_stage.RunStageRequest(
        layer=spec.layer,
        hidden_states=tensor_pb2.Tensor(
            dtype=spec.inputs[0].dtype,
            shape=reference["shape"],
            data=encode(reference["input"], spec.inputs[0].dtype),
        ),
    )
    answer = stub.RunStage(request, timeout=SECONDS).hidden_states
    output = decode(answer.data, answer.dtype)
    if reference["output"] is None:
        print(f"layer {spec.layer}: {list(answer.shape)} came back, first {output[:3]}")
        return
    worst = max(abs(a - b) for a, b in zip(output, reference["output"], strict=True))
    print(f"layer {spec.layer}: {list(answer.shape)} came back, {worst:.1e} from the reference")
    if not worst <= reference["tolerance"]:
        sys.exit(f"that is more than {reference['tolerance']}")


def encode(values: list[float], dtype: int) -> bytes:
    """Little-endian, row after row. bfloat16 is the upper half of a float32 (cut off here, not rounded)."""
    data = little_endian(array.array("f", values)).tobytes()
    if dtype == tensor_pb2.DTYPE_BF16:
        return b"".join(data[i + 2 : i + 4] for i in range(0, len(data), 4))
    return data


def decode(data: bytes, dtype: int) -> list[float]:
    if dtype == tensor_pb2.DTYPE_BF16:
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    return little_endian(array.array("f", data)).tolist()


def little_endian(values: array.array) -> array.array:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", required=True, metavar="HOST:PORT")
    parser.add_argument("--ffn", required=True, metavar="HOST:PORT")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--reference", metavar="FILE", help="JSON: layer, shape, input, output, tolerance")
    options = parser.parse_args()
    reference = json.loads(pathlib.Path(options.reference).read_text()) if options.reference else None

    with grpc.insecure_channel(options.attention) as attention, grpc.insecure_channel(options.ffn) as ffn:
        for channel, role in (attention, "attention"), (ffn, "ffn"):
            check_health(channel, role)
            list_services(channel, role)
        stub = inference_pb2_grpc.InferenceServiceStub(attention)
        show_model(stub)
        stream_completion(stub, options.prompt, options.max_tokens)
        show_refusal(stub)
        run_layer(layer_stage_pb2_grpc.LayerStageServiceStub(ffn), reference)


if __name__ == "__main__":
    try:
        main()
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
