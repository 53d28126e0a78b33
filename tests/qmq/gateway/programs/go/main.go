// Programs that use RocketMQ's own Go client: rocketmq_programs HOST:PORT PROGRAM TOPIC [PROGRAM TOPIC]...
// What they saw they print, a line for each message.
package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"time"

	rocketmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
)

const count = 20

var background = context.Background()

func check(failure error) {
	if failure != nil {
		panic(failure)
	}
}

func tell(parts ...any) {
	line := "result"
	for _, each := range parts {
		line += fmt.Sprintf("\t%v", each)
	}
	fmt.Println(line)
}

func text(value *string) string {
	if value == nil {
		return ""
	}
	return *value
}

func tellMessage(message *rocketmq.MessageView) {
	group := text(message.GetMessageGroup())
	tell(message.GetMessageId(), string(message.GetBody()), text(message.GetTag()), group, message.GetDeliveryAttempt())
}

func configuration(address string) *rocketmq.Config {
	return &rocketmq.Config{Endpoint: address, ConsumerGroup: "go", Credentials: &credentials.SessionCredentials{}}
}

func startedProducer(address string, topic string, options ...rocketmq.ProducerOption) rocketmq.Producer {
	producer, failure := rocketmq.NewProducer(configuration(address), append(options, rocketmq.WithTopics(topic))...)
	check(failure)
	check(producer.Start())
	return producer
}

func send(producer rocketmq.Producer, message *rocketmq.Message) *rocketmq.SendReceipt {
	receipts, failure := producer.Send(background, message)
	check(failure)
	return receipts[0]
}

func normalProducer(address string, topic string) {
	producer := startedProducer(address, topic)
	for number := range count {
		message := &rocketmq.Message{Topic: topic, Body: fmt.Appendf(nil, "number %d", number)}
		message.SetTag("red")
		message.SetKeys(fmt.Sprintf("key-%d", number))
		message.AddProperty("n", fmt.Sprint(number))
		tell(send(producer, message).MessageID)
	}
	check(producer.GracefulStop())
}

func fifoProducer(address string, topic string) {
	producer := startedProducer(address, topic)
	for number := range count {
		message := &rocketmq.Message{Topic: topic, Body: fmt.Append(nil, number)}
		message.SetMessageGroup(fmt.Sprintf("group-%d", number%3))
		tell(send(producer, message).MessageID)
	}
	check(producer.GracefulStop())
}

// One message comes soon, and one of an hour is recalled.
func delayProducer(address string, topic string) {
	producer := startedProducer(address, topic)
	for what, delay := range map[string]time.Duration{"soon": 1500 * time.Millisecond, "late": time.Hour} {
		message := &rocketmq.Message{Topic: topic, Body: []byte(what)}
		message.SetDelayTimestamp(time.Now().Add(delay))
		receipt := send(producer, message)
		tell(what, receipt.MessageID)
		if what == "late" {
			recalled, failure := producer.Recall(background, topic, receipt.RecallHandle)
			check(failure)
			tell("recalled", recalled)
		}
	}
	check(producer.GracefulStop())
}

func transactionProducer(address string, topic string) {
	asked := make(chan bool, count)
	checker := &rocketmq.TransactionChecker{Check: func(message *rocketmq.MessageView) rocketmq.TransactionResolution {
		tell("checked", message.GetMessageId())
		asked <- true
		return rocketmq.COMMIT
	}}
	producer := startedProducer(address, topic, rocketmq.WithTransactionChecker(checker))
	for _, what := range []string{"commit", "rollback", "forget"} {
		transaction := producer.BeginTransaction()
		message := &rocketmq.Message{Topic: topic, Body: []byte(what)}
		receipts, failure := producer.SendWithTransaction(background, message, transaction)
		check(failure)
		tell(what, receipts[0].MessageID)
		switch what {
		case "commit":
			check(transaction.Commit())
		case "rollback":
			check(transaction.RollBack())
		}
	}
	select {
	case <-asked:
		tell("in time", true)
	case <-time.After(time.Minute):
		tell("in time", false)
	}
	time.Sleep(time.Second) // for the answer, which the client sends after its checker has returned
	check(producer.GracefulStop())
}

// The first message is left invisible for a second, without an acknowledgement.
func simpleConsumer(address string, topic string) {
	consumer, failure := rocketmq.NewSimpleConsumer(configuration(address),
		rocketmq.WithSimpleAwaitDuration(time.Second),
		rocketmq.WithSimpleSubscriptionExpressions(map[string]*rocketmq.FilterExpression{topic: rocketmq.SUB_ALL}))
	check(failure)
	check(consumer.Start())
	isFirst := true
	for empty := 0; empty < 3; {
		found, failure := consumer.Receive(background, 16, 15*time.Second)
		if failure != nil && !strings.Contains(failure.Error(), "MESSAGE_NOT_FOUND") {
			panic(failure)
		}
		empty++
		for _, each := range found {
			empty = 0
			tellMessage(each)
			if isFirst {
				check(consumer.ChangeInvisibleDuration(each, time.Second))
			} else {
				check(consumer.Ack(background, each))
			}
			isFirst = false
		}
	}
	check(consumer.GracefulStop())
}

// The first message fails once.
func pushConsumer(address string, topic string) {
	var seen atomic.Int32
	enough := make(chan bool)
	consume := func(message *rocketmq.MessageView) rocketmq.ConsumerResult {
		number := seen.Add(1)
		tellMessage(message)
		if number == count+1 {
			close(enough)
		}
		if number == 1 {
			return rocketmq.FAILURE
		}
		return rocketmq.SUCCESS
	}
	consumer, failure := rocketmq.NewPushConsumer(configuration(address),
		rocketmq.WithPushAwaitDuration(time.Second),
		rocketmq.WithPushSubscriptionExpressions(map[string]*rocketmq.FilterExpression{topic: rocketmq.SUB_ALL}),
		rocketmq.WithPushMessageListener(&rocketmq.FuncMessageListener{Consume: consume}))
	check(failure)
	check(consumer.Start())
	select {
	case <-enough:
	case <-time.After(time.Minute):
	}
	time.Sleep(500 * time.Millisecond) // for the last acknowledgement, which the client sends after its listener has returned
	check(consumer.GracefulStop())
}

func main() {
	rocketmq.EnableSsl = false
	programs := map[string]func(string, string){
		"normal_producer":      normalProducer,
		"fifo_producer":        fifoProducer,
		"delay_producer":       delayProducer,
		"transaction_producer": transactionProducer,
		"simple_consumer":      simpleConsumer,
		"push_consumer":        pushConsumer,
	}
	for at := 2; at < len(os.Args); at += 2 {
		fmt.Printf("program\t%s\n", os.Args[at])
		programs[os.Args[at]](os.Args[1], os.Args[at+1])
	}
}
