// A Go client of both services: health, model info, a streamed completion, a refusal, one FFN layer.
//
//	go run . -attention 127.0.0.1:8000 -ffn 127.0.0.1:8100
//
// README.md one folder up says how gen/ is made.
package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	afdv1 "afd-client/gen/afd/v1"
)

func main() {
	log.SetFlags(0)
	attentionAddress := flag.String("attention", "127.0.0.1:8000", "attention rank, host:port")
	ffnAddress := flag.String("ffn", "127.0.0.1:8100", "FFN rank, host:port")
	prompt := flag.String("prompt", "Once upon a time", "what to continue")
	maxTokens := flag.Uint("max-tokens", 32, "most tokens to generate")
	referenceFile := flag.String("reference", "", "JSON: layer, shape, input, output, tolerance")
	flag.Parse()

	if err := run(*attentionAddress, *ffnAddress, *prompt, uint32(*maxTokens), *referenceFile); err != nil {
		log.Fatal(err)
	}
}

func run(attentionAddress, ffnAddress, prompt string, maxTokens uint32, referenceFile string) error {
	plain := grpc.WithTransportCredentials(insecure.NewCredentials())
	attention, err := grpc.NewClient(attentionAddress, plain)
	if err != nil {
		return err
	}
	defer attention.Close()
	ffn, err := grpc.NewClient(ffnAddress, plain)
	if err != nil {
		return err
	}
	defer ffn.Close()

	// One deadline for everything: gRPC has none of its own. Its end cancels whatever still runs.
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	inference := afdv1.NewInferenceServiceClient(attention)
	for _, step := range []func() error{
		func() error { return checkHealth(ctx, attention, "attention") },
		func() error { return checkHealth(ctx, ffn, "ffn") },
		func() error { return showModel(ctx, inference) },
		func() error { return streamCompletion(ctx, inference, prompt, maxTokens) },
		func() error { return showRefusal(ctx, inference) },
		func() error { return runLayer(ctx, afdv1.NewLayerStageServiceClient(ffn), referenceFile) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// "ready" follows readiness, "live" only says that the process is worth keeping; "" stands for "ready".
func checkHealth(ctx context.Context, connection *grpc.ClientConn, role string) error {
	request := &healthv1.HealthCheckRequest{Service: "ready"}
	answer, err := healthv1.NewHealthClient(connection).Check(ctx, request)
	if err != nil {
		return fmt.Errorf("health of %s: %w", role, err)
	}
	fmt.Printf("health: %s %s\n", role, answer.Status)
	return nil
}

func showModel(ctx context.Context, inference afdv1.InferenceServiceClient) error {
	info, err := inference.GetModelInfo(ctx, &afdv1.GetModelInfoRequest{})
	if err != nil {
		return fmt.Errorf("model info: %w", err)
	}
	model := info.Model
	fmt.Printf("model: %s, %s, %d layers of %d\n", info.Name, model.Architecture, model.NumLayers, model.HiddenSize)
	for _, peer := range info.FfnPeers {
		fmt.Printf("ffn: %s has shard %d of %d, over %s\n", peer.Address, peer.Shard.Index, peer.Shard.Count, peer.Link)
	}
	return nil
}

// Text arrives in pieces; the last message says why it ended. Cancelling ctx ends the request at the server too.
func streamCompletion(ctx context.Context, inference afdv1.InferenceServiceClient, prompt string, maxTokens uint32) error {
	stream, err := inference.Generate(ctx, &afdv1.GenerateRequest{
		Prompt:   &afdv1.GenerateRequest_Text{Text: prompt},
		Sampling: &afdv1.SamplingParams{Temperature: proto.Float32(0)},
		Stop:     &afdv1.StopConditions{MaxTokens: proto.Uint32(maxTokens)},
	})
	if err != nil {
		return fmt.Errorf("completion: %w", err)
	}
	fmt.Print("completion: ")
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("completion: %w", err)
		}
		fmt.Print(piece.Text)
		if piece.FinishReason != afdv1.FinishReason_FINISH_REASON_UNSPECIFIED {
			fmt.Printf("\nfinished: %s, %d tokens\n", piece.FinishReason, piece.Usage.CompletionTokens)
		}
	}
}

// A bad field comes back as InvalidArgument; google.rpc.BadRequest among the details names it. Errors of a stream come
// with the first Recv.
func showRefusal(ctx context.Context, inference afdv1.InferenceServiceClient) error {
	stream, err := inference.Generate(ctx, &afdv1.GenerateRequest{
		Prompt: &afdv1.GenerateRequest_Text{Text: "Hello"},
		Stop:   &afdv1.StopConditions{MaxTokens: proto.Uint32(0)},
	})
	if err == nil {
		_, err = stream.Recv()
	}
	refusal := status.Convert(err)
	if refusal.Code() != codes.InvalidArgument {
		return fmt.Errorf("max_tokens = 0 was not refused: %v", err)
	}
	var fields []string
	for _, detail := range refusal.Details() {
		if bad, ok := detail.(*errdetails.BadRequest); ok {
			for _, violation := range bad.FieldViolations {
				fields = append(fields, violation.Field)
			}
		}
	}
	fmt.Printf("refused: %s, field %s: %s\n", refusal.Code(), strings.Join(fields, " "), refusal.Message())
	return nil
}

// What goes into a layer and what should come out.
type reference struct {
	Layer     int
	Shape     []int64
	Input     []float32
	Output    []float32
	Tolerance float64
}

// Rows go to one layer's FFN and come back: as many, as wide. With several shards each gives a partial sum.
func runLayer(ctx context.Context, stages afdv1.LayerStageServiceClient, referenceFile string) error {
	described, err := stages.Describe(ctx, &afdv1.DescribeRequest{})
	if err != nil {
		return fmt.Errorf("describe: %w", err)
	}
	wanted, err := readReference(referenceFile, int64(described.Model.HiddenSize))
	if err != nil {
		return err
	}
	spec := described.Layers[wanted.Layer]
	if len(spec.Inputs) > 1 {
		return fmt.Errorf("layer %d also takes side tensors: not in this example", spec.Layer)
	}
	answer, err := stages.RunStage(ctx, &afdv1.RunStageRequest{
		Layer: spec.Layer,
		HiddenStates: &afdv1.Tensor{
			Dtype: spec.Inputs[0].Dtype,
			Shape: wanted.Shape,
			Data:  encode(wanted.Input, spec.Inputs[0].Dtype),
		},
	})
	if err != nil {
		return fmt.Errorf("layer %d: %w", spec.Layer, err)
	}
	back := answer.HiddenStates
	output := decode(back.Data, back.Dtype)
	if wanted.Output == nil {
		fmt.Printf("layer %d: %v came back, first %v\n", spec.Layer, back.Shape, output[:3])
		return nil
	}
	if len(output) != len(wanted.Output) {
		return fmt.Errorf("layer %d: %d values came back, expected %d", spec.Layer, len(output), len(wanted.Output))
	}
	worst := 0.0
	for i := range output {
		worst = math.Max(worst, math.Abs(float64(output[i]-wanted.Output[i])))
	}
	fmt.Printf("layer %d: %v came back, %.1e from the reference\n", spec.Layer, back.Shape, worst)
	if !(worst <= wanted.Tolerance) {
		return fmt.Errorf("that is more than %v", wanted.Tolerance)
	}
	return nil
}

func readReference(file string, width int64) (*reference, error) {
	if file == "" {
		input := make([]float32, 2*width)
		for i := range input {
			input[i] = 0.5
		}
		return &reference{Shape: []int64{2, width}, Input: input}, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	wanted := &reference{}
	return wanted, json.Unmarshal(text, wanted)
}

// Little-endian, row after row. bfloat16 is the upper half of a float32 (cut off here, not rounded).
func encode(values []float32, dtype afdv1.Dtype) []byte {
	var data []byte
	for _, value := range values {
		bits := math.Float32bits(value)
		if dtype == afdv1.Dtype_DTYPE_BF16 {
			data = binary.LittleEndian.AppendUint16(data, uint16(bits>>16))
		} else {
			data = binary.LittleEndian.AppendUint32(data, bits)
		}
	}
	return data
}

func decode(data []byte, dtype afdv1.Dtype) []float32 {
	var values []float32
	if dtype == afdv1.Dtype_DTYPE_BF16 {
		for ; len(data) >= 2; data = data[2:] {
			values = append(values, math.Float32frombits(uint32(binary.LittleEndian.Uint16(data))<<16))
		}
		return values
	}
	for ; len(data) >= 4; data = data[4:] {
		values = append(values, math.Float32frombits(binary.LittleEndian.Uint32(data)))
	}
	return values
}
