// A client process in Java: it does what clients/phases.py says. A library's client says how it sends and consumes.

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.util.*;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLongArray;

abstract class PhaseClient {
    static final int RING = 1000;
    static final BufferedReader IN = new BufferedReader(new InputStreamReader(System.in));
    static String address;

    final Map<String, Object> phase;
    final byte[][] bodies = new byte[RING][];
    final AtomicLongArray counts = new AtomicLongArray(RING);
    final List<Long> latencies = Collections.synchronizedList(new ArrayList<>());
    volatile boolean isOver = false;
    volatile long endNs = 0;
    long sent = 0, beginNs = 0, beginCpuNs = 0;

    PhaseClient(Map<String, Object> phase) {
        this.phase = phase;
        Random random = new Random();
        for (int number = 0; number < RING; number++) {
            bodies[number] = new byte[whole("size", 100)];
            random.nextBytes(bodies[number]);
            ByteBuffer.wrap(bodies[number]).putLong(number).putLong(0);
        }
    }

    // --- what a library does ----------------------------------------------------------------------------------------------

    abstract void make() throws Exception;

    // Sends in bulk while maySend(), counts in `sent`, and returns when all is acknowledged.
    abstract void publish() throws Exception;

    // Sends a message; `acknowledged` is run when it is stored.
    abstract void send(byte[] body, Runnable acknowledged) throws Exception;

    // Consumes in the thread of the call: releases `assigned`, waits for `started`, and returns when isOver.
    abstract void take(String group, Semaphore assigned, Semaphore started) throws Exception;

    // --- phases -----------------------------------------------------------------------------------------------------------

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

    void awaited() throws Exception {
        int tasks = whole("tasks", 1);
        Semaphore free = new Semaphore(tasks);
        begin();
        for (; maySend(); sent++) {
            free.acquire();
            send(bodies[(int) (sent % RING)], free::release);
        }
        free.acquire(tasks);
    }

    void paced() throws Exception {
        Semaphore acknowledged = new Semaphore(0);
        begin();
        for (; maySend(); sent++) {
            long aheadNs = beginNs + sent * 1_000_000_000L / whole("per_s", 1) - System.nanoTime();
            if (aheadNs > 0) Thread.sleep(aheadNs / 1_000_000, (int) (aheadNs % 1_000_000));
            byte[] body = bodies[(int) (sent % RING)].clone();
            ByteBuffer.wrap(body).putLong(8, System.nanoTime()); // on Linux the clock of Python's monotonic_ns
            send(body, acknowledged::release);
        }
        acknowledged.acquire((int) sent);
    }

    void consume() throws Exception {
        List<Thread> threads = new ArrayList<>();
        Semaphore assigned = new Semaphore(0), started = new Semaphore(0);
        int consumers = whole("consumers", 1), groups = whole("groups", 1);
        for (int group = 0; group < groups; group++)
            for (int each = 0; each < consumers; each++) {
                String name = phase.get("prefix").toString() + group;
                threads.add(new Thread(() -> {
                    try {
                        take(name, assigned, started);
                    } catch (Exception failure) {
                        failed(failure);
                    }
                }));
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

    void arrived(byte[] body) {
        ByteBuffer found = ByteBuffer.wrap(body);
        if (whole("per_s", 0) > 0) latencies.add(System.nanoTime() - found.getLong(8));
        counts.incrementAndGet((int) found.getLong(0));
    }

    static void failed(Throwable failure) {
        failure.printStackTrace();
        System.exit(1);
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

    static void run(String[] words, java.util.function.Function<Map<String, Object>, PhaseClient> with) throws Exception {
        address = words[0];
        for (String line = IN.readLine(); line != null; line = IN.readLine()) {
            PhaseClient client = with.apply(parse(line));
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
