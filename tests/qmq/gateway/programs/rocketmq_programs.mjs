// Programs that use RocketMQ's Node client, one after another: `node rocketmq_programs.mjs MODULES HOST:PORT [NAME TOPIC]...`. They print
// what they saw, a line of `result` for each message: id, body, tag, message group, attempt.

import { createRequire } from 'node:module';

const [modules, endpoints, ...wanted] = process.argv.slice(2);
const { Producer, SimpleConsumer, PushConsumer, ConsumeResult } = createRequire(modules + '/')('rocketmq-client-nodejs');

const COUNT = 20;
const quiet = { debug() {}, info() {}, warn() {}, error: console.error, trace() {}, fatal: console.error };
const common = { endpoints, namespace: '', logger: quiet, requestTimeout: 10_000 };

const tell = (...parts) => console.log(['result', ...parts].join('\t'));
const tellMessage = view => tell(view.messageId, view.body.toString(), view.tag ?? '', view.messageGroup ?? '', view.deliveryAttempt);

async function normal_producer(topic) {
  const producer = new Producer({ ...common, topics: [topic] });
  await producer.startup();
  for (let number = 0; number < COUNT; number++) {
    const body = Buffer.from(`number ${number}`);
    tell((await producer.send({ topic, body, tag: 'red', keys: [`key-${number}`] })).messageId);
  }
  await producer.shutdown();
}

async function fifo_producer(topic) {
  const producer = new Producer({ ...common, topics: [topic] });
  await producer.startup();
  for (let number = 0; number < COUNT; number++) {
    tell((await producer.send({ topic, body: Buffer.from(`${number}`), messageGroup: `group-${number % 3}` })).messageId);
  }
  await producer.shutdown();
}

async function simple_consumer(topic) {
  const consumer = new SimpleConsumer({ ...common, consumerGroup: 'node', subscriptions: new Map([[topic, '*']]), awaitDuration: 1_000 });
  await consumer.startup();
  let isFirst = true;
  for (let empty = 0; empty < 3; ) {
    const found = await consumer.receive(16, 15_000);
    empty = found.length ? 0 : empty + 1;
    for (const each of found) {
      tellMessage(each);
      if (isFirst) await consumer.changeInvisibleDuration(each, 1_000);
      else await consumer.ack(each);
      isFirst = false;
    }
  }
  await consumer.shutdown();
}

async function push_consumer(topic) {
  let seen = 0;
  let enough;
  const ended = new Promise(resolve => { enough = resolve; });
  const messageListener = {
    async consume(view) {
      tellMessage(view);
      seen += 1;
      if (seen > COUNT) enough();
      return seen === 1 ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
    },
  };
  const consumer = new PushConsumer({ ...common, consumerGroup: 'node', subscriptions: new Map([[topic, '*']]), messageListener });
  await consumer.startup();
  await ended;
  await new Promise(resolve => setTimeout(resolve, 500));
  await consumer.shutdown();
}

const programs = { normal_producer, fifo_producer, simple_consumer, push_consumer };
for (let at = 0; at < wanted.length; at += 2) {
  console.log(`program\t${wanted[at]}`);
  await programs[wanted[at]](wanted[at + 1]);
}
process.exit(0);
