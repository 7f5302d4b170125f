"""Python's gRPC against a port under TLS with a token: `grpc_over_tls.py HOST:PORT TOKEN CA.pem`. Messages are empty or
not looked into, so nothing is generated."""
import sys

import grpc


def main():
    address, token, ca = sys.argv[1:]
    with open(ca, "rb") as file:
        credentials = grpc.ssl_channel_credentials(file.read())
    with grpc.secure_channel(address, credentials) as channel:
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert health(b"", timeout=30) == b"\x08\x01", "not serving"
        info = channel.unary_unary("/afd.v1.InferenceService/GetModelInfo")
        assert b"test" in info(b"", metadata=[("authorization", f"Bearer {token}")], timeout=30)
        for metadata in ([], [("authorization", "Bearer wrong")]):
            try:
                info(b"", metadata=metadata, timeout=30)
                raise AssertionError("nobody should be let in")
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNAUTHENTICATED, error


if __name__ == "__main__":
    main()
