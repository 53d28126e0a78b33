// Load from RocketMQ's own Java client, for bench/gateway.py and tools/gateway_faults.py.
//
//   java -cp JAR RocketmqLoad.java ADDRESS send TOPIC COUNT BYTES AT_ONCE GROUPS [SHARES]
//   java -cp JAR RocketmqLoad.java ADDRESS receive TOPIC GROUP COUNT THREADS BATCH IDLE_S
//
// A body begins with its number. With GROUPS, message n is of message group n % GROUPS, and a group's messages are sent one after another.
// A receiver ends when it has COUNT messages, or when nothing has come for IDLE_S; for its first one it waits ten times as long, since a
// sender may take minutes to begin on a busy machine.
// What is not acknowledged is sent again. With SHARES the sender says "stored" whenever such a part of all is stored, and begins the next
// part when it reads a line: whoever runs it can so have something happen while messages are under way. At the end a line of JSON says what
// happened.

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Arrays;
import java.util.BitSet;
import java.util.Collections;
import java.util.List;
import java.util.Scanner;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;

public class RocketmqLoad {
    static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();

    static ClientConfiguration configuration(String address) {
        return ClientConfiguration.newBuilder().setEndpoints(address).enableSsl(false).setRequestTimeout(Duration.ofSeconds(10)).build();
    }

    static Message message(String topic, int number, int bytes, int groups) {
        byte[] body = Arrays.copyOf((number + " ").getBytes(StandardCharsets.UTF_8), bytes);
        MessageBuilder builder = PROVIDER.newMessageBuilder().setTopic(topic).setBody(body);
        return (groups > 0 ? builder.setMessageGroup("group-" + number % groups) : builder).build();
    }

    static final Object GATE = new Object();
    static final AtomicInteger STORED = new AtomicInteger();
    static int shareSize = Integer.MAX_VALUE;
    static int shares = 1;
    static int sharesAllowed = 1;

    /** Each line that is read allows one more share. */
    static void readLines() {
        Scanner lines = new Scanner(System.in);
        while (lines.hasNextLine()) {
            lines.nextLine();
            synchronized (GATE) {
                sharesAllowed++;
                GATE.notifyAll();
            }
        }
    }

    static void waitForShare(int number) throws InterruptedException {
        synchronized (GATE) {
            while (Math.min(number / shareSize, shares - 1) >= sharesAllowed) {  // what a division leaves belongs to the last share
                GATE.wait();
            }
        }
    }

    static void stored() {
        if (STORED.incrementAndGet() % shareSize == 0) {
            System.out.println("stored");
        }
    }

    static void send(String address, String topic, int count, int bytes, int atOnce, int groups) throws Exception {
        long[] nanos = new long[count];
        AtomicInteger again = new AtomicInteger();
        long begun;
        try (Producer producer = PROVIDER.newProducerBuilder().setClientConfiguration(configuration(address)).setTopics(topic).build()) {
            begun = System.nanoTime();
            if (groups > 0) {
                sendGroups(producer, topic, count, bytes, atOnce, groups, nanos, again);
            } else {
                Semaphore room = new Semaphore(atOnce);
                for (int number = 0; number < count; number++) {
                    waitForShare(number);
                    room.acquire();
                    sendUntilStored(producer, topic, number, bytes, nanos, again, room);
                }
                room.acquire(atOnce);
            }
            double seconds = (System.nanoTime() - begun) / 1e9;
            Arrays.sort(nanos);
            System.out.printf("{\"sent\": %d, \"seconds\": %.3f, \"p50_us\": %d, \"p99_us\": %d, \"again\": %d}%n", count, seconds,
                nanos[count / 2] / 1000, nanos[count * 99 / 100] / 1000, again.get());
        }
    }

    static void sendUntilStored(Producer producer, String topic, int number, int bytes, long[] nanos, AtomicInteger again, Semaphore room) {
        long begun = System.nanoTime();
        producer.sendAsync(message(topic, number, bytes, 0)).whenComplete((receipt, failure) -> {
            if (failure != null) {
                again.incrementAndGet();
                pause();
                sendUntilStored(producer, topic, number, bytes, nanos, again, room);
            } else {
                nanos[number] = System.nanoTime() - begun;
                stored();
                room.release();
            }
        });
    }

    static void sendGroups(Producer producer, String topic, int count, int bytes, int threads, int groups, long[] nanos, AtomicInteger again)
        throws InterruptedException {
        Thread[] all = new Thread[threads];
        for (int index = 0; index < threads; index++) {
            int which = index;
            all[index] = new Thread(() -> {
                for (int number = 0; number < count; number++) {
                    if (number % groups % threads == which) {
                        try {
                            waitForShare(number);
                        } catch (InterruptedException interrupted) {
                            return;
                        }
                        long begun = System.nanoTime();
                        while (true) {
                            try {
                                producer.send(message(topic, number, bytes, groups));
                                break;
                            } catch (Exception failure) {
                                again.incrementAndGet();
                                pause();
                            }
                        }
                        nanos[number] = System.nanoTime() - begun;
                        stored();
                    }
                }
            });
            all[index].start();
        }
        for (Thread each : all) {
            each.join();
        }
    }

    static void pause() {
        try {
            Thread.sleep(100);
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
        }
    }

    static long idleNanos(int idleSeconds, boolean isBeforeFirst) {
        return idleSeconds * 1_000_000_000L * (isBeforeFirst ? 10 : 1);
    }

    static void receive(String address, String topic, String group, int count, int threads, int batch, int idleSeconds) throws Exception {
        FilterExpression all = new FilterExpression("*", FilterExpressionType.TAG);
        BitSet seen = new BitSet(count);
        java.util.Map<String, Integer> last = new java.util.HashMap<>();
        AtomicInteger distinct = new AtomicInteger(), again = new AtomicInteger(), disorder = new AtomicInteger(), failures = new AtomicInteger();
        AtomicLong first = new AtomicLong(), newest = new AtomicLong(System.nanoTime());
        try (SimpleConsumer consumer = PROVIDER.newSimpleConsumerBuilder().setClientConfiguration(configuration(address))
            .setConsumerGroup(group).setAwaitDuration(Duration.ofSeconds(5)).setSubscriptionExpressions(Collections.singletonMap(topic, all))
            .build()) {
            Thread[] workers = new Thread[threads];
            for (int index = 0; index < threads; index++) {
                workers[index] = new Thread(() -> {
                    while (distinct.get() < count && System.nanoTime() - newest.get() < idleNanos(idleSeconds, first.get() == 0)) {
                        try {
                            List<MessageView> found = consumer.receive(batch, Duration.ofSeconds(10));
                            for (MessageView each : found) {
                                take(each, seen, last, distinct, again, disorder);
                                first.compareAndSet(0, System.nanoTime());
                                newest.set(System.nanoTime());
                                if (each.getMessageGroup().isPresent()) {
                                    consumer.ack(each);
                                } else {
                                    consumer.ackAsync(each);
                                }
                            }
                        } catch (Exception failure) {
                            failures.incrementAndGet();
                            pause();
                        }
                    }
                });
                workers[index].start();
            }
            for (Thread each : workers) {
                each.join();
            }
            System.out.printf("{\"received\": %d, \"again\": %d, \"out_of_order\": %d, \"failures\": %d, \"seconds\": %.3f}%n", distinct.get(),
                again.get(), disorder.get(), failures.get(), (newest.get() - first.get()) / 1e9);
        }
    }

    static void take(MessageView view, BitSet seen, java.util.Map<String, Integer> last, AtomicInteger distinct, AtomicInteger again,
        AtomicInteger disorder) {
        String text = StandardCharsets.UTF_8.decode(view.getBody()).toString();
        int number = Integer.parseInt(text.substring(0, text.indexOf(' ')));
        synchronized (seen) {
            if (seen.get(number)) {
                again.incrementAndGet();
                return;
            }
            seen.set(number);
            distinct.incrementAndGet();
            view.getMessageGroup().ifPresent(group -> {
                Integer before = last.put(group, number);
                if (before != null && before > number) {
                    disorder.incrementAndGet();
                }
            });
        }
    }

    public static void main(String[] words) throws Exception {
        if (words[1].equals("send")) {
            if (words.length > 7) {
                shares = Integer.parseInt(words[7]);
                shareSize = Integer.parseInt(words[3]) / shares;
                Thread reader = new Thread(RocketmqLoad::readLines);
                reader.setDaemon(true);
                reader.start();
            }
            send(words[0], words[2], Integer.parseInt(words[3]), Integer.parseInt(words[4]), Integer.parseInt(words[5]),
                Integer.parseInt(words[6]));
        } else {
            receive(words[0], words[2], words[3], Integer.parseInt(words[4]), Integer.parseInt(words[5]), Integer.parseInt(words[6]),
                Integer.parseInt(words[7]));
        }
        System.exit(0);
    }
}
