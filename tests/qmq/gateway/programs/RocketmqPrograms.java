// Programs that use RocketMQ's Java client, one after another: `java -cp JAR RocketmqPrograms.java HOST:PORT [NAME TOPIC]...`. They print
// what they saw, a line of `result` for each message: id, body, tag, message group, attempt.

import apache.rocketmq.v2.Code;
import apache.rocketmq.v2.FilterType;
import apache.rocketmq.v2.GetOffsetRequest;
import apache.rocketmq.v2.GetOffsetResponse;
import apache.rocketmq.v2.MessageQueue;
import apache.rocketmq.v2.MessagingServiceGrpc;
import apache.rocketmq.v2.PullMessageRequest;
import apache.rocketmq.v2.PullMessageResponse;
import apache.rocketmq.v2.QueryOffsetPolicy;
import apache.rocketmq.v2.QueryOffsetRequest;
import apache.rocketmq.v2.QueryOffsetResponse;
import apache.rocketmq.v2.QueryRouteRequest;
import apache.rocketmq.v2.Resource;
import apache.rocketmq.v2.Status;
import apache.rocketmq.v2.UpdateOffsetRequest;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Collections;
import java.util.Iterator;
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
import org.apache.rocketmq.client.java.route.Endpoints;
import org.apache.rocketmq.shaded.io.grpc.ManagedChannel;
import org.apache.rocketmq.shaded.io.grpc.ManagedChannelBuilder;
import org.apache.rocketmq.shaded.io.grpc.Metadata;
import org.apache.rocketmq.shaded.io.grpc.stub.MetadataUtils;

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
            SendReceipt late = producer.send(message(topic, "late").setDeliveryTimestamp(now + 3_600_000).build());
            tell("late", late.getMessageId());
            tell("recalled", producer.recallMessage(topic, late.getRecallHandle()).getMessageId());
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

    /** Reads each queue of the topic to its end, and keeps its offset there. The client has no pull consumer, but its jar has the calls. */
    static void pullConsumer(String address, String topic, String group) throws Exception {
        String[] place = address.split(":");
        ManagedChannel channel = ManagedChannelBuilder.forAddress(place[0], Integer.parseInt(place[1])).usePlaintext().build();
        Metadata headers = new Metadata();
        headers.put(Metadata.Key.of("x-mq-client-id", Metadata.ASCII_STRING_MARSHALLER), "java@pull");
        MessagingServiceGrpc.MessagingServiceBlockingStub calls = MessagingServiceGrpc.newBlockingStub(channel)
            .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers)).withDeadlineAfter(60, TimeUnit.SECONDS);
        Resource named = Resource.newBuilder().setName(topic).build();
        Resource reader = Resource.newBuilder().setName(group).build();
        QueryRouteRequest route = QueryRouteRequest.newBuilder().setTopic(named)
            .setEndpoints(new Endpoints(address).toProtobuf()).build();
        for (MessageQueue queue : calls.queryRoute(route).getMessageQueuesList()) {
            QueryOffsetResponse end = calls.queryOffset(QueryOffsetRequest.newBuilder().setMessageQueue(queue)
                .setQueryOffsetPolicy(QueryOffsetPolicy.END).build());
            tell("end", end.getStatus().getCode(), end.getOffset());
            PullMessageRequest.Builder pull = PullMessageRequest.newBuilder().setGroup(reader).setMessageQueue(queue).setBatchSize(7);
            pull.getFilterExpressionBuilder().setType(FilterType.TAG).setExpression("*");
            pull.getLongPollingTimeoutBuilder().setSeconds(1);
            for (Status status = Status.newBuilder().setCode(Code.OK).build(); status.getCode() == Code.OK; ) {
                Iterator<PullMessageResponse> answers = calls.pullMessage(pull.build());
                while (answers.hasNext()) {
                    PullMessageResponse each = answers.next();
                    switch (each.getContentCase()) {
                        case STATUS -> status = each.getStatus();
                        case MESSAGE -> tell("pulled", each.getMessage().getSystemProperties().getMessageId());
                        case NEXT_OFFSET -> pull.setOffset(each.getNextOffset());
                        default -> throw new IllegalStateException(each.toString());
                    }
                }
                if (status.getCode() != Code.OK) {
                    tell("no more", status.getCode(), status.getMessage());
                }
            }
            tell("updated", calls.updateOffset(UpdateOffsetRequest.newBuilder().setGroup(reader).setMessageQueue(queue)
                .setOffset(pull.getOffset()).build()).getStatus().getCode());
            GetOffsetResponse kept = calls.getOffset(GetOffsetRequest.newBuilder().setGroup(reader).setMessageQueue(queue).build());
            tell("kept", kept.getStatus().getCode(), kept.getOffset());
        }
        channel.shutdownNow();
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
            case "pull_consumer" -> pullConsumer(address, topic, "puller");
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
