// Programs that use RocketMQ's Java client, one after another: `java -cp JAR RocketmqPrograms.java HOST:PORT [NAME TOPIC]...`. They print
// what they saw, a line of `result` for each message: id, body, tag, message group, attempt.

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

public class RocketmqPrograms {
    static final int COUNT = 20;
    static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();

    static ClientConfiguration configuration(String address) {
        boolean tls = Boolean.getBoolean("tls");
        return ClientConfiguration.newBuilder()
            .setEndpoints(address).enableSsl(tls).setRequestTimeout(Duration.ofSeconds(10)).build();
    }

    static MessageBuilder message(String topic, String body) {
        return PROVIDER.newMessageBuilder().setTopic(topic).setBody(body.getBytes(StandardCharsets.UTF_8));
    }

    static void tell(Object... parts) {
        StringBuilder line = new StringBuilder("result");
        for (Object each : parts) {
            line.append('\t').append(each);
        }
        synchronized (System.out) {
            System.out.println(line);
        }
    }

    static void tell(MessageView message) {
        tell(message.getMessageId(), StandardCharsets.UTF_8.decode(message.getBody()), message.getTag().orElse(""),
            message.getMessageGroup().orElse(""), message.getDeliveryAttempt());
    }

    static void normalProducer(String address, String topic) throws Exception {
        try (Producer producer = PROVIDER.newProducerBuilder().setClientConfiguration(configuration(address)).setTopics(topic).build()) {
            for (int number = 0; number < COUNT; number++) {
                Message sent = message(topic, "number " + number).setTag("red").setKeys("key-" + number).addProperty("n", "" + number).build();
                tell(producer.send(sent).getMessageId());
            }
        }
    }

    static void fifoProducer(String address, String topic) throws Exception {
        try (Producer producer = PROVIDER.newProducerBuilder().setClientConfiguration(configuration(address)).setTopics(topic).build()) {
            for (int number = 0; number < COUNT; number++) {
                tell(producer.send(message(topic, "" + number).setMessageGroup("group-" + number % 3).build()).getMessageId());
            }
        }
    }

    static void delayProducer(String address, String topic) throws Exception {
        try (Producer producer = PROVIDER.newProducerBuilder().setClientConfiguration(configuration(address)).setTopics(topic).build()) {
            long now = System.currentTimeMillis();
            SendReceipt soon = producer.send(message(topic, "soon").setDeliveryTimestamp(now + 1500).build());
            tell("soon", soon.getMessageId());
        }
    }

    static void transactionProducer(String address, String topic) throws Exception {
        CountDownLatch checked = new CountDownLatch(1);
        try (Producer producer = PROVIDER.newProducerBuilder().setClientConfiguration(configuration(address)).setTopics(topic)
            .setTransactionChecker(view -> {
                tell("checked", view.getMessageId());
                checked.countDown();
                return TransactionResolution.COMMIT;
            }).build()) {
            for (String what : List.of("commit", "rollback", "forget")) {
                Transaction transaction = producer.beginTransaction();
                SendReceipt receipt = producer.send(message(topic, what).build(), transaction);
                tell(what, receipt.getMessageId());
                if (what.equals("commit")) {
                    transaction.commit();
                } else if (what.equals("rollback")) {
                    transaction.rollback();
                }
            }
            tell("in time", checked.await(60, TimeUnit.SECONDS));
            Thread.sleep(1000);
        }
    }

    static void simpleConsumer(String address, String topic, String group) throws Exception {
        FilterExpression all = new FilterExpression("*", FilterExpressionType.TAG);
        try (SimpleConsumer consumer = PROVIDER.newSimpleConsumerBuilder().setClientConfiguration(configuration(address))
            .setConsumerGroup(group).setAwaitDuration(Duration.ofSeconds(1)).setSubscriptionExpressions(Collections.singletonMap(topic, all))
            .build()) {
            boolean isFirst = true;
            for (int empty = 0; empty < 3; ) {
                List<MessageView> found = consumer.receive(16, Duration.ofSeconds(15));
                empty = found.isEmpty() ? empty + 1 : 0;
                for (MessageView each : found) {
                    tell(each);
                    if (isFirst) {
                        consumer.changeInvisibleDuration(each, Duration.ofSeconds(1));
                    } else {
                        consumer.ack(each);
                    }
                    isFirst = false;
                }
            }
        }
    }

    static void pushConsumer(String address, String topic, String group) throws Exception {
        FilterExpression all = new FilterExpression("*", FilterExpressionType.TAG);
        AtomicInteger seen = new AtomicInteger();
        CountDownLatch enough = new CountDownLatch(COUNT + 1);
        PushConsumer consumer = PROVIDER.newPushConsumerBuilder().setClientConfiguration(configuration(address))
            .setConsumerGroup(group).setSubscriptionExpressions(Collections.singletonMap(topic, all))
            .setMessageListener(view -> {
                tell(view);
                enough.countDown();
                return seen.getAndIncrement() == 0 ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
            }).build();
        tell("in time", enough.await(60, TimeUnit.SECONDS));
        Thread.sleep(500);
        consumer.close();
    }

    /** One of the programs that the client's own jar brings. Most of them never end. */
    static void startExample(String name) throws Exception {
        java.lang.reflect.Method main = Class.forName("org.apache.rocketmq.client.java.example." + name).getMethod("main", String[].class);
        new Thread(() -> {
            try {
                main.invoke(null, (Object) new String[0]);
            } catch (ReflectiveOperationException failure) {
                failure.printStackTrace();
            }
        }).start();
    }

    static void run(String program, String address, String topic, String group) throws Exception {
        switch (program) {
            case "tls" -> System.setProperty("tls", topic);
            case "example" -> startExample(topic);
            case "normal_producer" -> normalProducer(address, topic);
            case "fifo_producer" -> fifoProducer(address, topic);
            case "delay_producer" -> delayProducer(address, topic);
            case "transaction_producer" -> transactionProducer(address, topic);
            case "simple_consumer" -> simpleConsumer(address, topic, group);
            case "push_consumer" -> pushConsumer(address, topic, group);
            default -> throw new IllegalArgumentException(program);
        }
    }

    public static void main(String[] arguments) throws Exception {
        for (int at = 1; at < arguments.length; at += 2) {
            System.out.println("program\t" + arguments[at]);
            run(arguments[at], arguments[0], arguments[at + 1], "java");
        }
        if (!arguments[1].equals("example")) {
            System.exit(0);
        }
    }
}
