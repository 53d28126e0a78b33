// Programs that use RocketMQ's own Rust client: rocketmq_programs HOST:PORT PROGRAM TOPIC [PROGRAM TOPIC]...
// What they saw they print, a line for each message.

use rocketmq::conf::{ClientOption, ProducerOption, SimpleConsumerOption};
use rocketmq::model::common::{FilterExpression, FilterType};
use rocketmq::model::message::MessageBuilder;
use rocketmq::model::transaction::{Transaction, TransactionResolution};
use rocketmq::{Producer, SimpleConsumer};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const COUNT: usize = 20;

fn options(address: &str) -> ClientOption {
    let mut options = ClientOption::default();
    options.set_access_url(address);
    options.set_enable_tls(false);
    options.set_timeout(Duration::from_secs(10));
    options.set_long_polling_timeout(Duration::from_secs(3));
    options
}

fn producer_options(topic: &str) -> ProducerOption {
    let mut options = ProducerOption::default();
    options.set_topics(vec![topic]);
    options
}

async fn producer(address: &str, topic: &str) -> Producer {
    let mut producer = Producer::new(producer_options(topic), options(address)).unwrap();
    producer.start().await.unwrap();
    producer
}

async fn normal_producer(address: &str, topic: &str) {
    let producer = producer(address, topic).await;
    for number in 0..COUNT {
        let body = format!("number {number}").into_bytes();
        let message = MessageBuilder::builder().set_topic(topic).set_body(body).set_tag("red").set_keys(vec![format!("key-{number}")]);
        println!("result\t{}", producer.send(message.build().unwrap()).await.unwrap().message_id());
    }
    producer.shutdown().await.unwrap();
}

async fn fifo_producer(address: &str, topic: &str) {
    let producer = producer(address, topic).await;
    for number in 0..COUNT {
        let group = format!("group-{}", number % 3);
        let message = MessageBuilder::fifo_message_builder(topic, number.to_string().into_bytes(), group).build().unwrap();
        println!("result\t{}", producer.send(message).await.unwrap().message_id());
    }
    producer.shutdown().await.unwrap();
}

async fn delay_producer(address: &str, topic: &str) {
    let producer = producer(address, topic).await;
    let due = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64 + 2;
    let message = MessageBuilder::delay_message_builder(topic, b"soon".to_vec(), due).build().unwrap();
    println!("result\tsoon\t{}", producer.send(message).await.unwrap().message_id());
    producer.shutdown().await.unwrap();
}

async fn transaction_producer(address: &str, topic: &str) {
    let (told, mut asked) = tokio::sync::mpsc::unbounded_channel();
    let checker = Box::new(move |_id, message: rocketmq::model::message::MessageView| {
        println!("result\tchecked\t{}", message.message_id());
        let _ = told.send(());
        TransactionResolution::COMMIT
    });
    let mut producer = Producer::new_transaction_producer(producer_options(topic), options(address), checker).unwrap();
    producer.start().await.unwrap();
    for what in ["commit", "rollback", "forget"] {
        let message = MessageBuilder::transaction_message_builder(topic, what.as_bytes().to_vec()).build().unwrap();
        let transaction = producer.send_transaction_message(message).await.unwrap();
        println!("result\t{}\t{}", what, transaction.message_id());
        match what {
            "commit" => transaction.commit().await.unwrap(),
            "rollback" => transaction.rollback().await.unwrap(),
            _ => {}
        }
    }
    let in_time = tokio::time::timeout(Duration::from_secs(60), asked.recv()).await.is_ok();
    println!("result\tin time\t{in_time}");
    tokio::time::sleep(Duration::from_secs(1)).await; // for the answer, which the client sends after its checker has returned
    producer.shutdown().await.unwrap();
}

async fn simple_consumer(address: &str, topic: &str) {
    let mut consumer_options = SimpleConsumerOption::default();
    consumer_options.set_topics(vec![topic]);
    consumer_options.set_consumer_group("rust");
    let mut consumer = SimpleConsumer::new(consumer_options, options(address)).unwrap();
    consumer.start().await.unwrap();
    let mut empty = 0;
    while empty < 2 {
        let all = FilterExpression::new(FilterType::Tag, "*");
        let found = consumer.receive_with(topic.to_string(), &all, 16, Duration::from_secs(15)).await.unwrap_or_default();
        empty = if found.is_empty() { empty + 1 } else { 0 };
        for message in found {
            let body = String::from_utf8_lossy(message.body());
            let (tag, group) = (message.tag().unwrap_or(""), message.message_group().unwrap_or(""));
            println!("result\t{}\t{}\t{}\t{}\t{}", message.message_id(), body, tag, group, message.delivery_attempt());
            consumer.ack(&message).await.unwrap();
        }
    }
    consumer.shutdown().await.unwrap();
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    for pair in arguments[1..].chunks(2) {
        println!("program\t{}", pair[0]);
        match pair[0].as_str() {
            "normal_producer" => normal_producer(&arguments[0], &pair[1]).await,
            "fifo_producer" => fifo_producer(&arguments[0], &pair[1]).await,
            "delay_producer" => delay_producer(&arguments[0], &pair[1]).await,
            "transaction_producer" => transaction_producer(&arguments[0], &pair[1]).await,
            "simple_consumer" => simple_consumer(&arguments[0], &pair[1]).await,
            other => panic!("no program {other}"),
        }
    }
}
