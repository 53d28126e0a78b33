// RocketMQ's own client over its remoting protocol: batches of a ring in bulk, push consumers.

import java.util.*;
import java.util.concurrent.Semaphore;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.*;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.*;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

class RocketMqClient extends PhaseClient {
    static final int BATCHES = 8, AT_ONCE = 1000;
    static final long STABLE_NS = 3_000_000_000L; // consumers of a group that start together have divided its queues
    static DefaultMQProducer producer;

    RocketMqClient(Map<String, Object> phase) {
        super(phase);
    }

    static DefaultMQProducer producer() throws Exception {
        if (producer == null) {
            producer = new DefaultMQProducer("bench");
            producer.setNamesrvAddr(address);
            producer.setSendMsgTimeout(30_000);
            producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE); // the bodies are random
            producer.start();
        }
        return producer;
    }

    void make() throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt();
        admin.setNamesrvAddr(address);
        admin.setInstanceName("admin" + System.nanoTime());
        admin.start();
        int queues = whole("partitions", 0) > 0 ? whole("partitions", 0) : 4;
        String broker = admin.examineBrokerClusterInfo().getBrokerAddrTable().values().iterator().next().selectBrokerAddr();
        admin.createAndUpdateTopicConfig(broker, new TopicConfig(topic(), queues, queues));
        while (queues() == null) Thread.sleep(10);
        admin.shutdown();
        begin();
    }

    // The queues of the topic; null while the name server does not know them.
    List<MessageQueue> queues() throws Exception {
        try {
            return producer().fetchPublishMessageQueues(topic());
        } catch (org.apache.rocketmq.client.exception.MQClientException failure) {
            return null;
        }
    }

    void publish() throws Exception {
        List<MessageQueue> queues = queues();
        Semaphore free = new Semaphore(BATCHES);
        int laps = whole("size", 100) > 16384 ? 1 : Math.max(1, Math.min(AT_ONCE, 2_000_000 / whole("size", 100)));
        List<Semaphore> turns = queues.stream().map(each -> new Semaphore(1)).toList(); // one batch at a time keeps a queue's order
        begin();
        while (maySend()) {
            if (is("ordered")) {
                List<List<Message>> batches = queues.stream().map(each -> (List<Message>) new ArrayList<Message>()).toList();
                for (int left = RING; left > 0; left--, sent++) {
                    int number = (int) (sent % RING);
                    batches.get(number % queues.size()).add(new Message(topic(), "", String.format("key-%04d", number), bodies[number]));
                }
                for (int at = 0; at < queues.size(); at++) {
                    turns.get(at).acquire();
                    producer().send(batches.get(at), queues.get(at), answer(turns.get(at)::release));
                }
                continue;
            }
            List<Message> batch = new ArrayList<>();
            for (int left = laps; left > 0; left--, sent++) batch.add(new Message(topic(), bodies[(int) (sent % RING)]));
            free.acquire();
            if (batch.size() == 1) producer().send(batch.get(0), answer(free::release));
            else producer().send(batch, answer(free::release));
        }
        free.acquire(BATCHES);
        for (Semaphore each : turns) each.acquire();
    }

    void send(byte[] body, Runnable acknowledged) throws Exception {
        producer().send(new Message(topic(), body), answer(acknowledged));
    }

    static SendCallback answer(Runnable acknowledged) {
        return new SendCallback() {
            public void onSuccess(SendResult result) {
                if (result.getSendStatus() != SendStatus.SEND_OK) failed(new IllegalStateException(result.toString()));
                acknowledged.run();
            }

            public void onException(Throwable failure) {
                failed(failure);
            }
        };
    }

    void take(String group, Semaphore assigned, Semaphore started) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(address);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullBatchSize(AT_ONCE);
        consumer.setConsumeMessageBatchMaxSize(AT_ONCE);
        consumer.setPullThresholdForQueue(10 * AT_ONCE);
        if (whole("groups", 1) > 1) consumer.setConsumeThreadMin(1);
        if (whole("groups", 1) > 1) consumer.setConsumeThreadMax(1);
        consumer.subscribe(topic(), "*");
        if (is("ordered"))
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                count(messages, started);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        else
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                count(messages, started);
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        consumer.start();
        Set<MessageQueue> queues = Set.of();
        for (long sinceNs = System.nanoTime(); queues.isEmpty() || System.nanoTime() - sinceNs < STABLE_NS; Thread.sleep(10)) {
            Set<MessageQueue> now = Set.copyOf(consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet());
            if (!now.equals(queues)) sinceNs = System.nanoTime();
            queues = now;
        }
        assigned.release();
        while (!isOver) Thread.sleep(10);
        consumer.shutdown();
    }

    // What the client fetched before the row begins waits for it.
    void count(List<MessageExt> messages, Semaphore started) {
        started.acquireUninterruptibly();
        started.release();
        for (MessageExt each : messages) arrived(each.getBody());
    }

    public static void main(String[] words) throws Exception {
        System.setProperty("rocketmq.client.rebalance.waitInterval", "1000");
        run(words, RocketMqClient::new);
    }
}
