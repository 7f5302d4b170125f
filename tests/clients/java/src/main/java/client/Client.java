package client;

import afd.v1.DescribeRequest;
import afd.v1.DescribeResponse;
import afd.v1.Dtype;
import afd.v1.FfnPeer;
import afd.v1.FinishReason;
import afd.v1.GenerateRequest;
import afd.v1.GenerateResponse;
import afd.v1.GetModelInfoRequest;
import afd.v1.GetModelInfoResponse;
import afd.v1.InferenceServiceGrpc;
import afd.v1.LayerSpec;
import afd.v1.LayerStageServiceGrpc;
import afd.v1.RunStageRequest;
import afd.v1.SamplingParams;
import afd.v1.StopConditions;
import afd.v1.Tensor;
import com.google.gson.Gson;
import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthGrpc;
import io.grpc.protobuf.StatusProto;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/**
 * A Java client of both services: health, model info, a streamed completion, a refusal, one FFN layer.
 *
 * <pre>java -jar target/client.jar --attention 127.0.0.1:8000 --ffn 127.0.0.1:8100</pre>
 *
 * Maven makes the classes of afd.v1 from proto/ (pom.xml).
 */
public final class Client {
  /** A deadline for every call: gRPC has none of its own. */
  private static final long SECONDS = 30;

  /** UTF-8 whatever the terminal's locale says. */
  private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);

  public static void main(String[] args) throws Exception {
    Map<String, String> options = new HashMap<>(Map.of(
        "--attention", "127.0.0.1:8000",
        "--ffn", "127.0.0.1:8100",
        "--prompt", "Once upon a time",
        "--max-tokens", "32"));
    for (int at = 0; at + 1 < args.length; at += 2) {
      options.put(args[at], args[at + 1]);
    }

    ManagedChannel attention = connect(options.get("--attention"));
    ManagedChannel ffn = connect(options.get("--ffn"));
    try {
      checkHealth(attention, "attention");
      checkHealth(ffn, "ffn");
      var inference = InferenceServiceGrpc.newBlockingStub(attention);
      showModel(inference);
      streamCompletion(inference, options.get("--prompt"), Integer.parseInt(options.get("--max-tokens")));
      showRefusal(inference);
      runLayer(LayerStageServiceGrpc.newBlockingStub(ffn), options.get("--reference"));
    } catch (StatusRuntimeException error) {
      System.err.println(error.getMessage());
      System.exit(1);
    } finally {
      attention.shutdownNow();
      ffn.shutdownNow();
    }
  }

  private static ManagedChannel connect(String address) {
    return Grpc.newChannelBuilder(address, InsecureChannelCredentials.create()).build();
  }

  /** "ready" follows readiness, "live" only says that the process is worth keeping; "" stands for "ready". */
  private static void checkHealth(ManagedChannel channel, String role) {
    var request = HealthCheckRequest.newBuilder().setService("ready").build();
    var stub = HealthGrpc.newBlockingStub(channel).withDeadlineAfter(SECONDS, TimeUnit.SECONDS);
    OUT.printf("health: %s %s%n", role, stub.check(request).getStatus());
  }

  private static void showModel(InferenceServiceGrpc.InferenceServiceBlockingStub stub) {
    GetModelInfoResponse info = stub.withDeadlineAfter(SECONDS, TimeUnit.SECONDS)
        .getModelInfo(GetModelInfoRequest.getDefaultInstance());
    var model = info.getModel();
    OUT.printf("model: %s, %s, %d layers of %d%n",
        info.getName(), model.getArchitecture(), model.getNumLayers(), model.getHiddenSize());
    for (FfnPeer peer : info.getFfnPeersList()) {
      OUT.printf("ffn: %s has shard %d of %d, over %s%n",
          peer.getAddress(), peer.getShard().getIndex(), peer.getShard().getCount(), peer.getLink());
    }
  }

  /** Text arrives in pieces; the last message says why it ended. */
  private static void streamCompletion(
      InferenceServiceGrpc.InferenceServiceBlockingStub stub, String prompt, int maxTokens) {
    var request = GenerateRequest.newBuilder()
        .setText(prompt)
        .setSampling(SamplingParams.newBuilder().setTemperature(0))
        .setStop(StopConditions.newBuilder().setMaxTokens(maxTokens))
        .build();
    OUT.print("completion: ");
    Iterator<GenerateResponse> pieces = stub.withDeadlineAfter(SECONDS, TimeUnit.SECONDS).generate(request);
    while (pieces.hasNext()) {
      GenerateResponse piece = pieces.next();
      OUT.print(piece.getText());
      OUT.flush();
      if (piece.getFinishReason() != FinishReason.FINISH_REASON_UNSPECIFIED) {
        OUT.printf("%nfinished: %s, %d tokens%n",
            piece.getFinishReason(), piece.getUsage().getCompletionTokens());
      }
    }
  }

  /** A bad field comes back as INVALID_ARGUMENT; google.rpc.BadRequest among the details names it. */
  private static void showRefusal(InferenceServiceGrpc.InferenceServiceBlockingStub stub)
      throws InvalidProtocolBufferException {
    var request = GenerateRequest.newBuilder()
        .setText("Hello")
        .setStop(StopConditions.newBuilder().setMaxTokens(0))
        .build();
    try {
      stub.withDeadlineAfter(SECONDS, TimeUnit.SECONDS).generate(request).forEachRemaining(piece -> {});
    } catch (StatusRuntimeException error) {
      List<String> fields = new ArrayList<>();
      for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
        if (detail.is(BadRequest.class)) {
          detail.unpack(BadRequest.class).getFieldViolationsList()
              .forEach(violation -> fields.add(violation.getField()));
        }
      }
      OUT.printf("refused: %s, field %s: %s%n",
          error.getStatus().getCode(), String.join(" ", fields), error.getStatus().getDescription());
      return;
    }
    throw new IllegalStateException("max_tokens = 0 was not refused");
  }

  /** What goes into a layer and what should come out; read from JSON. */
  private record Reference(int layer, long[] shape, float[] input, float[] output, double tolerance) {
    static Reference read(String file, int width) throws IOException {
      if (file != null) {
        return new Gson().fromJson(Files.readString(Path.of(file)), Reference.class);
      }
      float[] input = new float[2 * width];
      Arrays.fill(input, 0.5f);
      return new Reference(0, new long[] {2, width}, input, null, 0);
    }
  }

  /** Rows go to one layer's FFN and come back: as many, as wide. With several shards each gives a partial sum. */
  private static void runLayer(LayerStageServiceGrpc.LayerStageServiceBlockingStub stub, String referenceFile)
      throws IOException {
    DescribeResponse described = stub.withDeadlineAfter(SECONDS, TimeUnit.SECONDS)
        .describe(DescribeRequest.getDefaultInstance());
    Reference reference = Reference.read(referenceFile, described.getModel().getHiddenSize());
    LayerSpec spec = described.getLayers(reference.layer());
    if (spec.getInputsCount() > 1) {
      throw new IllegalStateException("this layer also takes side tensors: not in this example");
    }
    Dtype dtype = spec.getInputs(0).getDtype();
    Tensor.Builder rows = Tensor.newBuilder().setDtype(dtype).setData(encode(reference.input(), dtype));
    for (long size : reference.shape()) {
      rows.addShape(size);
    }
    var request = RunStageRequest.newBuilder().setLayer(spec.getLayer()).setHiddenStates(rows).build();
    Tensor back = stub.withDeadlineAfter(SECONDS, TimeUnit.SECONDS).runStage(request).getHiddenStates();
    float[] output = decode(back.getData(), back.getDtype());
    if (reference.output() == null) {
      OUT.printf("layer %d: %s came back, first %s%n",
          spec.getLayer(), back.getShapeList(), Arrays.toString(Arrays.copyOf(output, 3)));
      return;
    }
    if (output.length != reference.output().length) {
      throw new IllegalStateException(output.length + " values came back");
    }
    double worst = 0;
    for (int at = 0; at < output.length; at++) {
      worst = Math.max(worst, Math.abs(output[at] - reference.output()[at]));
    }
    OUT.printf("layer %d: %s came back, %.1e from the reference%n", spec.getLayer(), back.getShapeList(), worst);
    if (!(worst <= reference.tolerance())) {
      throw new IllegalStateException("that is more than " + reference.tolerance());
    }
  }

  /** Little-endian, row after row. bfloat16 is the upper half of a float32 (cut off here, not rounded). */
  private static ByteString encode(float[] values, Dtype dtype) {
    boolean half = dtype == Dtype.DTYPE_BF16;
    ByteBuffer data = ByteBuffer.allocate(values.length * (half ? 2 : 4)).order(ByteOrder.LITTLE_ENDIAN);
    for (float value : values) {
      if (half) {
        data.putShort((short) (Float.floatToRawIntBits(value) >>> 16));
      } else {
        data.putFloat(value);
      }
    }
    return ByteString.copyFrom(data.flip());
  }

  private static float[] decode(ByteString bytes, Dtype dtype) {
    boolean half = dtype == Dtype.DTYPE_BF16;
    ByteBuffer data = bytes.asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN);
    float[] values = new float[bytes.size() / (half ? 2 : 4)];
    for (int at = 0; at < values.length; at++) {
      values[at] = half ? Float.intBitsToFloat(data.getShort() << 16) : data.getFloat();
    }
    return values;
  }
}
