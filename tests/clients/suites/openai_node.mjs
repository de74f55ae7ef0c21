// The official client for Node: every OpenAI route, its stream helpers, resuming after a cut, its exception classes.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

const { CLIENT_MODEL: MODEL, CLIENT_SCRIPTED: SCRIPTED, CLIENT_KEY: apiKey } = process.env;
const clientOf = (baseURL, options = {}) => new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 30_000, ...options });
const client = clientOf(process.env.CLIENT_URL);
const other = clientOf(process.env.CLIENT_OTHER_URL);
const messages = [{ role: "user", content: "say hello world" }];
const unknown = `resp_${MODEL}.0_${"f".repeat(32)}`;

async function all(stream) {
  const found = [];
  for await (const item of stream) found.push(item);
  return found;
}

const textOf = (events) =>
  events
    .filter((event) => event.type === "response.output_text.delta")
    .map((event) => event.delta)
    .join("");

test("models", async () => {
  const names = (await all(client.models.list())).map((model) => model.id);
  assert.ok(names.includes(MODEL) && names.includes(SCRIPTED));
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

test("a response", async () => {
  const response = await client.responses.create({ model: SCRIPTED, input: "say hello", metadata: { run: "1" } });
  assert.equal(response.output_text, "hello");
  assert.equal(response.status, "completed");
  assert.equal(response.usage.total_tokens, response.usage.input_tokens + response.usage.output_tokens);
});

test("a stream of events, numbered from 0", async () => {
  const events = await all(await client.responses.create({ model: SCRIPTED, input: "say streamed", stream: true }));
  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, index) => index));
  assert.equal(textOf(events), "streamed");
  assert.equal(events.at(-1).type, "response.completed");
});

test("the stream helper", async () => {
  const stream = client.responses.stream({ model: SCRIPTED, input: "say accumulated" });
  assert.equal((await stream.finalResponse()).output_text, "accumulated");
});

test("a cut stream is resumed at the other node", async () => {
  const stream = await client.responses.create({
    model: SCRIPTED,
    input: "repeat 20 on and on ",
    background: true,
    stream: true,
  });
  const events = [];
  for await (const event of stream) {
    events.push(event);
    if (events.length === 30) break;
  }
  const job = events[0].response.id;
  const query = { stream: true, starting_after: events.at(-1).sequence_number };
  events.push(...(await all(await other.responses.retrieve(job, query))));
  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, index) => index));
  assert.equal(textOf(events), "on and on ".repeat(20));
});

test("background, poll, cancel, delete", async () => {
  const { id, status } = await client.responses.create({ model: SCRIPTED, input: "repeat 9 x ", background: true });
  assert.ok(["queued", "in_progress"].includes(status));
  let found = await other.responses.retrieve(id);
  while (["queued", "in_progress"].includes(found.status)) found = await other.responses.retrieve(id);
  assert.equal(found.output_text, "x ".repeat(9));
  await assert.rejects(client.responses.cancel(id), OpenAI.BadRequestError);
  const long = await client.responses.create({ model: SCRIPTED, input: "repeat 500 x", background: true });
  assert.equal((await other.responses.cancel(long.id)).status, "cancelled");
  await client.responses.delete(id);
  await assert.rejects(other.responses.retrieve(id), OpenAI.NotFoundError);
});

test("input items and the next turn", async () => {
  const first = await client.responses.create({ model: SCRIPTED, input: "say one" });
  const items = await all(client.responses.inputItems.list(first.id));
  assert.equal(items[0].content[0].text, "say one");
  const next = { model: SCRIPTED, input: "say two", previous_response_id: first.id };
  assert.equal((await other.responses.create(next)).output_text, "two");
});

test("chat completions", async () => {
  const answer = await client.chat.completions.create({ model: SCRIPTED, messages });
  assert.equal(answer.choices[0].message.content, "hello world");
  const chunks = await all(
    await client.chat.completions.create({
      model: SCRIPTED,
      messages,
      stream: true,
      stream_options: { include_usage: true },
    }),
  );
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), "hello world");
  assert.ok(chunks.at(-1).usage.completion_tokens > 0);
  const stream = client.chat.completions.stream({ model: SCRIPTED, messages });
  assert.equal(await stream.finalContent(), "hello world");
});

test("completions", async () => {
  const asked = { model: SCRIPTED, prompt: "say raw\n", max_tokens: 20 };
  assert.equal((await client.completions.create(asked)).choices[0].text, "raw");
  const chunks = await all(await client.completions.create({ ...asked, stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), "raw");
});

test("exception classes", async () => {
  const bad = client.responses.create({ model: MODEL, input: "x", temperature: 9 });
  await assert.rejects(bad, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  await assert.rejects(client.responses.retrieve(unknown), OpenAI.NotFoundError);
  const stranger = clientOf(process.env.CLIENT_URL, { apiKey: "gp-nobodys" });
  await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
  const headers = { "Idempotency-Key": "key-of-the-node-conflict" };
  const first = await client.responses.create({ model: SCRIPTED, input: "say a" }, { headers });
  const again = await client.responses.create({ model: SCRIPTED, input: "say a" }, { headers });
  assert.equal(again.id, first.id);
  await assert.rejects(client.responses.create({ model: SCRIPTED, input: "say b" }, { headers }), OpenAI.ConflictError);
  const jobs = [];
  const full = async () => {
    for (let number = 0; number <= Number(process.env.CLIENT_PENDING); number++)
      jobs.push((await client.responses.create({ model: SCRIPTED, input: "repeat 400 busy ", background: true })).id);
  };
  await assert.rejects(full(), OpenAI.RateLimitError);
  for (const job of jobs) await client.responses.cancel(job);
  const stranded = clientOf(process.env.CLIENT_STRANDED_URL).responses.create({ model: MODEL, input: "x" });
  await assert.rejects(stranded, (error) => error instanceof OpenAI.InternalServerError && error.status === 503);
});
