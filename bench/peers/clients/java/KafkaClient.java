// Kafka's own client: acks=all, idempotent; poll() on one thread, with automatic commits. It does what clients/phases.py says.

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLongArray;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.*;

public class KafkaClient {
    static final int RING = 1000;
    static final String LARGEST = "2097152";
    static final BufferedReader IN = new BufferedReader(new InputStreamReader(System.in));
    static String address;
    static final Map<String, KafkaProducer<byte[], byte[]>> PRODUCERS = new HashMap<>();

    // --- a phase --------------------------------------------------------------------------------------------------------

    final Map<String, Object> phase;
    final byte[][] bodies = new byte[RING][];
    final AtomicLongArray counts = new AtomicLongArray(RING);
    final List<Long> latencies = Collections.synchronizedList(new ArrayList<>());
    volatile boolean isOver = false;
    volatile long endNs = 0;
    long sent = 0, beginNs = 0, beginCpuNs = 0;

    KafkaClient(Map<String, Object> phase) {
        this.phase = phase;
        Random random = new Random();
        for (int number = 0; number < RING; number++) {
            bodies[number] = new byte[whole("size", 100)];
            random.nextBytes(bodies[number]);
            ByteBuffer.wrap(bodies[number]).putLong(number).putLong(0);
        }
    }

    int whole(String name, int otherwise) {
        return phase.containsKey(name) ? (int) Double.parseDouble(phase.get(name).toString()) : otherwise;
    }

    boolean is(String name) {
        return "true".equals(String.valueOf(phase.get(name)));
    }

    String topic() {
        return phase.get("topic").toString();
    }

    static long cpuNs() {
        return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
    }

    static synchronized void say(String line) {
        System.out.println(line);
        System.out.flush();
    }

    void begin() throws Exception {
        say("{\"ready\": true}");
        if (!"begin".equals(IN.readLine().trim())) throw new IllegalStateException("begin is next");
        beginNs = System.nanoTime();
        beginCpuNs = cpuNs();
    }

    boolean maySend() {
        int messages = whole("messages", 0);
        return messages > 0 ? sent < messages : System.nanoTime() - beginNs < 1e9 * Double.parseDouble(phase.getOrDefault("seconds", "5").toString());
    }

    byte[][] keys() {
        byte[][] found = new byte[RING][];
        for (int number = 0; is("ordered") && number < RING; number++) found[number] = String.format("key-%04d", number).getBytes();
        return found;
    }

    // --- what producers do ----------------------------------------------------------------------------------------------

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
                producer.send(new ProducerRecord<>(topic(), keys[number], bodies[number]), KafkaClient::check);
            }
        }
        producer.flush();
    }

    static void check(RecordMetadata at, Exception failure) {
        if (failure != null) {
            failure.printStackTrace();
            System.exit(1);
        }
    }

    void awaited() throws Exception {
        KafkaProducer<byte[], byte[]> producer = producer("0");
        Semaphore free = new Semaphore(whole("tasks", 1));
        begin();
        while (maySend()) {
            free.acquire();
            producer.send(new ProducerRecord<>(topic(), bodies[(int) (sent % RING)]), (at, failure) -> {
                check(at, failure);
                free.release();
            });
            sent++;
        }
        free.acquire(whole("tasks", 1));
    }

    void paced() throws Exception {
        KafkaProducer<byte[], byte[]> producer = producer("0");
        begin();
        while (maySend()) {
            long aheadNs = beginNs + sent * 1_000_000_000L / whole("per_s", 1) - System.nanoTime();
            if (aheadNs > 0) Thread.sleep(aheadNs / 1_000_000, (int) (aheadNs % 1_000_000));
            byte[] body = bodies[(int) (sent % RING)].clone();
            ByteBuffer.wrap(body).putLong(8, monotonicNs());
            producer.send(new ProducerRecord<>(topic(), body), KafkaClient::check);
            sent++;
        }
        producer.flush();
    }

    // Linux: the clock of Java's nanoTime is that of Python's monotonic_ns.
    static long monotonicNs() {
        return System.nanoTime();
    }

    // --- what consumers do ----------------------------------------------------------------------------------------------

    void consume() throws Exception {
        List<Thread> threads = new ArrayList<>();
        Semaphore assigned = new Semaphore(0), started = new Semaphore(0);
        int consumers = whole("consumers", 1), groups = whole("groups", 1);
        for (int group = 0; group < groups; group++)
            for (int each = 0; each < consumers; each++) {
                String name = phase.get("prefix").toString() + group;
                threads.add(new Thread(() -> take(name, assigned, started)));
            }
        threads.forEach(Thread::start);
        assigned.acquire(threads.size());
        begin();
        started.release(threads.size());
        long seen = 0;
        for (String asked = IN.readLine().trim(); !asked.equals("stop"); asked = IN.readLine().trim()) {
            if (asked.equals("counts")) {
                say("{\"counts\": " + numbers() + "}");
                continue;
            }
            long found = 0;
            for (int number = 0; number < RING; number++) found += counts.get(number);
            if (found != seen) {
                seen = found;
                endNs = System.nanoTime();
            }
            say("{\"seen\": " + found + "}");
        }
        isOver = true;
        for (Thread each : threads) each.join();
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
            while (!isOver) count(consumer.poll(Duration.ofMillis(50)), isTimed);
        }
    }

    void count(ConsumerRecords<byte[], byte[]> records, boolean isTimed) {
        for (ConsumerRecord<byte[], byte[]> each : records) {
            ByteBuffer body = ByteBuffer.wrap(each.value());
            if (isTimed) latencies.add(System.nanoTime() - body.getLong(8));
            counts.incrementAndGet((int) body.getLong(0));
        }
    }

    // --- the report -----------------------------------------------------------------------------------------------------

    String report() {
        long nowNs = endNs > 0 ? endNs : System.nanoTime();
        StringJoiner parts = new StringJoiner(", ", "{", "}");
        List<Long> took = new ArrayList<>(latencies);
        Collections.sort(took);
        if (!took.isEmpty())
            for (Map.Entry<String, Double> each : new TreeMap<>(Map.of("p50", 0.5, "p99", 0.99, "p99.9", 0.999)).entrySet())
                parts.add("\"" + each.getKey() + "\": " + took.get((int) Math.min(took.size() * each.getValue(), took.size() - 1)) / 1e6);
        return "{\"done\": {\"counts\": " + numbers() + ", \"seconds\": " + (nowNs - beginNs) / 1e9 + ", \"cpu_s\": " + (cpuNs() - beginCpuNs) / 1e9
            + ", \"latency_ms\": " + parts + "}}";
    }

    String numbers() {
        StringJoiner found = new StringJoiner(", ", "[", "]");
        for (int number = 0; number < RING; number++)
            found.add(String.valueOf(sent > 0 ? sent / RING + (number < sent % RING ? 1 : 0) : counts.get(number)));
        return found.toString();
    }

    // A phase is one flat object of JSON: names, numbers, texts without quotes, true and false.
    static Map<String, Object> parse(String line) {
        Map<String, Object> found = new HashMap<>();
        for (String each : line.trim().substring(1, line.trim().length() - 1).split(",")) {
            String[] pair = each.split(":", 2);
            found.put(pair[0].replace("\"", "").trim(), pair[1].replace("\"", "").trim());
        }
        return found;
    }

    public static void main(String[] words) throws Exception {
        address = words[0];
        for (String line = IN.readLine(); line != null; line = IN.readLine()) {
            KafkaClient client = new KafkaClient(parse(line));
            switch (client.phase.get("work").toString()) {
                case "make" -> client.make();
                case "publish" -> client.publish();
                case "awaited" -> client.awaited();
                case "paced" -> client.paced();
                case "consume" -> client.consume();
                default -> throw new IllegalArgumentException(line);
            }
            say(client.report());
        }
        System.exit(0);
    }
}
