package org.apache.rocketmq.util;

import java.io.IOException;

/** Creates topics on QMQ, which has no name server. It takes the place of the suite's class. */
public class MQAdmin {
    /** What the suite shuts down at its end. */
    public static final class Closed {
        public void shutdown() {
        }
    }

    public static Closed mqAdminExt = new Closed();

    public static Closed initMQAdminExtInstance(String namesrvAddr) {
        return mqAdminExt;
    }

    public static boolean createTopic(String clusterName, String topic, int queueNum, String type) {
        return run("updateTopic", "-t", topic, "-a", "+message.type=" + type);
    }

    public static boolean createConsumerGroup(String clusterName, String groupId, int waitTimeSec) {
        return run("updateSubGroup", "-g", groupId);
    }

    public static Boolean resetOffsetByTimestamp(String consumerGroup, String topic, long timestamp) {
        return false;
    }

    private static boolean run(String... words) {
        String[] command = new String[words.length + 2];
        command[0] = "sh";
        command[1] = System.getenv("QMQ_MQADMIN");
        System.arraycopy(words, 0, command, 2, words.length);
        try {
            return new ProcessBuilder(command).inheritIO().start().waitFor() == 0;
        } catch (IOException | InterruptedException e) {
            throw new IllegalStateException(e);
        }
    }
}
