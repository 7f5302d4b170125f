// A TypeScript client of both services: health, model info, a streamed completion, a refusal, one FFN layer.
//
//     npm start -- --attention 127.0.0.1:8000 --ffn 127.0.0.1:8100
//
// The .proto files are read when the program starts; the types under gen/ are made from them when it is built
// (README.md one folder up).
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

import * as grpc from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';
import health from 'grpc-health-check';

import type { DescribeResponse__Output } from './gen/afd/v1/DescribeResponse.js';
import type { Dtype } from './gen/afd/v1/Dtype.js';
import type { GenerateResponse__Output } from './gen/afd/v1/GenerateResponse.js';
import type { GetModelInfoResponse__Output } from './gen/afd/v1/GetModelInfoResponse.js';
import type { InferenceServiceClient } from './gen/afd/v1/InferenceService.js';
import type { LayerStageServiceClient } from './gen/afd/v1/LayerStageService.js';
import type { RunStageResponse__Output } from './gen/afd/v1/RunStageResponse.js';
import type { HealthCheckResponse__Output } from './gen/grpc/health/v1/HealthCheckResponse.js';
import type { ProtoGrpcType as HealthTypes } from './gen/health.js';
import type { ProtoGrpcType as InferenceTypes } from './gen/inference.js';
import type { ProtoGrpcType as LayerStageTypes } from './gen/layer_stage.js';

type Protocol = InferenceTypes & LayerStageTypes & HealthTypes;

/** What goes into a layer and what should come out. */
interface Reference {
  layer: number;
  shape: number[];
  input: number[];
  output?: number[];
  tolerance?: number;
}

/** The same options as in package.json's "generate", so that values are what the types say. */
function loadProtocol(folder: string): Protocol {
  const files = ['afd/v1/inference.proto', 'afd/v1/layer_stage.proto', health.protoPath];
  const options = { includeDirs: [folder], longs: Number, enums: String, defaults: true, oneofs: true };
  return grpc.loadPackageDefinition(loadSync(files, options)) as unknown as Protocol;
}

/** A deadline for a call: gRPC has none of its own. */
function within(seconds: number): grpc.CallOptions {
  return { deadline: Date.now() + seconds * 1000 };
}

/** A call with one answer, as a promise. */
function unary<Answer>(start: (done: grpc.requestCallback<Answer>) => unknown): Promise<Answer> {
  return new Promise((resolve, reject) => {
    start((error, answer) => (answer === undefined ? reject(error) : resolve(answer)));
  });
}

/** `ready` follows readiness, `live` only says that the process is worth keeping; "" stands for `ready`. */
async function checkHealth(protocol: Protocol, address: string, role: string): Promise<void> {
  const client = new protocol.grpc.health.v1.Health(address, grpc.credentials.createInsecure());
  const request = { service: 'ready' };
  const { status } = await unary<HealthCheckResponse__Output>((done) => client.check(request, within(30), done));
  console.log(`health: ${role} ${status}`);
  client.close();
}

async function showModel(client: InferenceServiceClient): Promise<void> {
  const info = await unary<GetModelInfoResponse__Output>((done) => client.getModelInfo({}, within(30), done));
  const model = info.model!;
  console.log(`model: ${info.name}, ${model.architecture}, ${model.numLayers} layers of ${model.hiddenSize}`);
  for (const { address, shard, link } of info.ffnPeers) {
    console.log(`ffn: ${address} has shard ${shard!.index} of ${shard!.count}, over ${link}`);
  }
}

/** Text arrives in pieces; the last message says why it ended. Leaving the loop early cancels the request. */
async function streamCompletion(client: InferenceServiceClient, text: string, maxTokens: number): Promise<void> {
  const request = { text, sampling: { temperature: 0 }, stop: { maxTokens } };
  process.stdout.write('completion: ');
  for await (const piece of client.generate(request, within(30)) as AsyncIterable<GenerateResponse__Output>) {
    process.stdout.write(piece.text);
    if (piece.finishReason !== 'FINISH_REASON_UNSPECIFIED') {
      console.log(`\nfinished: ${piece.finishReason}, ${piece.usage!.completionTokens} tokens`);
    }
  }
}

/** A bad field comes back as INVALID_ARGUMENT with a sentence that names it. */
async function showRefusal(client: InferenceServiceClient): Promise<void> {
  try {
    for await (const _ of client.generate({ text: 'Hello', stop: { maxTokens: 0 } }, within(30)));
  } catch (error) {
    const { code, details } = error as grpc.ServiceError;
    console.log(`refused: ${grpc.status[code]}: ${details}`);
    return;
  }
  throw new Error('max_tokens = 0 was not refused');
}

/** Rows go to one layer's FFN and come back: as many, as wide. With several shards each gives a partial sum. */
async function runLayer(client: LayerStageServiceClient, reference?: Reference): Promise<void> {
  const described = await unary<DescribeResponse__Output>((done) => client.describe({}, within(30), done));
  const width = described.model!.hiddenSize;
  const { layer, shape, input, output, tolerance }: Reference =
    reference ?? { layer: 0, shape: [2, width], input: new Array(2 * width).fill(0.5) };
  const [rows, ...side] = described.layers[layer]!.inputs;
  if (side.length > 0) {
    throw new Error(`layer ${layer} also takes ${side.map(({ name }) => name)}: not in this example`);
  }
  const { dtype } = rows!;
  const request = { layer, hiddenStates: { dtype, shape, data: encode(input, dtype) } };
  const answer = await unary<RunStageResponse__Output>((done) => client.runStage(request, within(30), done));
  const back = answer.hiddenStates!;
  const values = decode(back.data, back.dtype);
  if (output === undefined) {
    console.log(`layer ${layer}: [${back.shape}] came back, first ${values.slice(0, 3)}`);
    return;
  }
  if (values.length !== output.length) {
    throw new Error(`${values.length} values came back, expected ${output.length}`);
  }
  const worst = Math.max(...values.map((value, at) => Math.abs(value - output[at]!)));
  console.log(`layer ${layer}: [${back.shape}] came back, ${worst.toExponential(1)} from the reference`);
  if (!(worst <= tolerance!)) {
    throw new Error(`that is more than ${tolerance}`);
  }
}

/** Little-endian, row after row. bfloat16 is the upper half of a float32 (cut off here, not rounded). */
function encode(values: number[], dtype: Dtype): Buffer {
  const data = Buffer.alloc(4 * values.length);
  values.forEach((value, at) => data.writeFloatLE(value, 4 * at));
  return dtype === 'DTYPE_BF16' ? Buffer.from(data.filter((_, at) => at % 4 >= 2)) : data;
}

function decode(data: Buffer, dtype: Dtype): number[] {
  if (dtype !== 'DTYPE_BF16') {
    return Array.from({ length: data.length / 4 }, (_, at) => data.readFloatLE(4 * at));
  }
  const whole = Buffer.alloc(4);
  return Array.from({ length: data.length / 2 }, (_, at) => {
    whole.writeUInt16LE(data.readUInt16LE(2 * at), 2);
    return whole.readFloatLE();
  });
}

async function main(): Promise<void> {
  const { values: options } = parseArgs({
    options: {
      attention: { type: 'string', default: '127.0.0.1:8000' },
      ffn: { type: 'string', default: '127.0.0.1:8100' },
      prompt: { type: 'string', default: 'Once upon a time' },
      'max-tokens': { type: 'string', default: '32' },
      /** JSON of a Reference. */
      reference: { type: 'string' },
      proto: { type: 'string', default: fileURLToPath(new URL('../../../../proto', import.meta.url)) },
    },
  });
  const protocol = loadProtocol(options.proto);
  await checkHealth(protocol, options.attention, 'attention');
  await checkHealth(protocol, options.ffn, 'ffn');

  const credentials = grpc.credentials.createInsecure();
  const inference = new protocol.afd.v1.InferenceService(options.attention, credentials);
  await showModel(inference);
  await streamCompletion(inference, options.prompt, Number(options['max-tokens']));
  await showRefusal(inference);
  inference.close();

  const stages = new protocol.afd.v1.LayerStageService(options.ffn, credentials);
  await runLayer(stages, options.reference ? JSON.parse(readFileSync(options.reference, 'utf8')) : undefined);
  stages.close();
}

main().catch((error: unknown) => {
  console.error(error instanceof Error ? error.message : error);
  process.exitCode = 1;
});
