// Kafka's own client: acks=all, idempotent; poll() on one thread, with automatic commits.

import java.time.Duration;
import java.util.*;
import java.util.concurrent.Semaphore;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.*;

class KafkaClient extends PhaseClient {
    static final String LARGEST = "2097152";
    static final Map<String, KafkaProducer<byte[], byte[]>> PRODUCERS = new HashMap<>();

    KafkaClient(Map<String, Object> phase) {
        super(phase);
    }

    static KafkaProducer<byte[], byte[]> producer(String linger) {
        return PRODUCERS.computeIfAbsent(linger, each -> new KafkaProducer<>(Map.of(
            "bootstrap.servers", address, "acks", "all", "enable.idempotence", "true", "linger.ms", each,
            "max.request.size", LARGEST, "buffer.memory", "134217728"), new ByteArraySerializer(), new ByteArraySerializer()));
    }

    void make() throws Exception {
        Map<String, String> settings = new HashMap<>(Map.of("max.message.bytes", LARGEST));
        if (is("flushed")) settings.put("flush.messages", "1");
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", (Object) address))) {
            admin.createTopics(List.of(new NewTopic(topic(), Math.max(whole("partitions", 1), 1), (short) 1).configs(settings))).all().get();
        }
        for (String linger : List.of("0", "5")) producer(linger).partitionsFor(topic());
        begin();
    }

    void publish() throws Exception {
        KafkaProducer<byte[], byte[]> producer = producer("5"); // the default of 4.x
        byte[][] keys = keys();
        begin();
        while (maySend()) {
            for (int left = whole("size", 100) > 16384 ? 10 : RING; left > 0; left--, sent++) {
                int number = (int) (sent % RING);
                producer.send(new ProducerRecord<>(topic(), keys[number], bodies[number]), (at, failure) -> {
                    if (failure != null) failed(failure);
                });
            }
        }
        producer.flush();
    }

    void send(byte[] body, Runnable acknowledged) {
        producer("0").send(new ProducerRecord<>(topic(), body), (at, failure) -> {
            if (failure != null) failed(failure);
            acknowledged.run();
        });
    }

    void take(String group, Semaphore assigned, Semaphore started) {
        boolean isTimed = whole("per_s", 0) > 0;
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(Map.of(
            "bootstrap.servers", address, "group.id", group, "auto.offset.reset", "earliest", "max.poll.records", isTimed ? "500" : "10000"),
            new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            boolean[] hasBegun = {false};
            consumer.subscribe(List.of(topic()), new ConsumerRebalanceListener() {
                public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
                    if (!hasBegun[0]) consumer.pause(partitions); // nothing is fetched before the row begins
                }

                public void onPartitionsRevoked(Collection<TopicPartition> partitions) {}
            });
            for (boolean isReady = false; !started.tryAcquire(); consumer.poll(Duration.ofMillis(10)))
                if (!isReady && !consumer.assignment().isEmpty()) {
                    isReady = true;
                    assigned.release();
                }
            hasBegun[0] = true;
            consumer.resume(consumer.assignment());
            while (!isOver) consumer.poll(Duration.ofMillis(50)).forEach(each -> arrived(each.value()));
        }
    }

    public static void main(String[] words) throws Exception {
        run(words, KafkaClient::new);
    }
}
