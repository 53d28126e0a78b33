// NATS JetStream by nats.go: PublishAsync with 4,000 pending; Consume with a callback that acknowledges each message. It does what
// clients/phases.py says.
package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	_ "unsafe"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const ring, pending, pendingLarge, large = 1000, 4000, 32, 64 << 10

// The clock of Python's monotonic_ns.
//
//go:linkname nanotime runtime.nanotime
func nanotime() int64

type phase struct {
	Work      string
	Topic     string
	Seconds   float64
	Messages  int64
	Size      int
	Tasks     int
	Per_s     int64
	Each      bool
	Consumers int
	Groups    int
	Prefix    string
}

type run struct {
	phase
	bodies    [ring][]byte
	counts    [ring]atomic.Int64
	sent      atomic.Int64
	lock      sync.Mutex
	latencies []int64
	begin     time.Time
	end       time.Time
	cpu       float64
}

var in = bufio.NewReader(os.Stdin)
var connection *nats.Conn
var stream, streamLarge jetstream.JetStream

// A sender waits while as many as may be pending are; by default it gives up after 200 ms.
var patient = jetstream.WithStallWait(30 * time.Second)

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func say(answer any) {
	line, err := json.Marshal(answer)
	must(err)
	fmt.Println(string(line))
}

func hear() string {
	line, err := in.ReadString('\n')
	if err != nil {
		os.Exit(0)
	}
	return strings.TrimSpace(line)
}

func cpu() float64 {
	var used syscall.Rusage
	must(syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return float64(used.Utime.Nano()+used.Stime.Nano()) / 1e9
}

func (r *run) ready() {
	say(map[string]bool{"ready": true})
	if hear() != "begin" {
		os.Exit(1)
	}
	r.begin, r.cpu = time.Now(), cpu()
}

func (r *run) maySend() bool {
	if r.Messages > 0 {
		return r.sent.Load() < r.Messages
	}
	return time.Since(r.begin).Seconds() < r.Seconds
}

func (r *run) next() []byte {
	return r.bodies[(r.sent.Add(1)-1)%ring]
}

// --- what producers do ---------------------------------------------------------------------------------------------------

func (r *run) make() {
	_, err := stream.CreateStream(context.Background(), jetstream.StreamConfig{Name: r.Topic, Subjects: []string{r.Topic}})
	must(err)
	r.ready()
}

func (r *run) publish() {
	sending, lap := stream, ring
	if r.Size > large {
		sending, lap = streamLarge, 10
	}
	r.ready()
	for r.maySend() {
		for number := 0; number < lap; number++ {
			_, err := sending.PublishAsync(r.Topic, r.next(), patient)
			must(err)
		}
	}
	<-sending.PublishAsyncComplete()
}

func (r *run) awaited() {
	r.ready()
	var group sync.WaitGroup
	for task := 0; task < r.Tasks; task++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for r.maySend() {
				_, err := stream.Publish(context.Background(), r.Topic, r.next())
				must(err)
			}
		}()
	}
	group.Wait()
}

func (r *run) paced() {
	r.ready()
	for r.maySend() {
		time.Sleep(time.Until(r.begin.Add(time.Duration(r.sent.Load() * int64(time.Second) / r.Per_s))))
		body := append([]byte{}, r.next()...)
		binary.BigEndian.PutUint64(body[8:], uint64(nanotime()))
		_, err := stream.PublishAsync(r.Topic, body, patient)
		must(err)
	}
	<-stream.PublishAsyncComplete()
}

// --- what consumers do ---------------------------------------------------------------------------------------------------

func (r *run) consume() {
	var made []jetstream.Consumer
	for group := 0; group < r.Groups; group++ {
		consumer, err := stream.CreateOrUpdateConsumer(context.Background(), r.Topic,
			jetstream.ConsumerConfig{Durable: fmt.Sprint(r.Prefix, group), AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 10_000})
		must(err)
		for each := 0; each < r.Consumers; each++ {
			made = append(made, consumer)
		}
	}
	r.ready()
	var taking []jetstream.ConsumeContext
	for _, each := range made {
		found, err := each.Consume(r.take, jetstream.PullMaxMessages(5_000))
		must(err)
		taking = append(taking, found)
	}
	seen := int64(0)
	for asked := hear(); asked != "stop"; asked = hear() {
		if asked == "counts" {
			say(map[string][]int64{"counts": r.numbers()})
			continue
		}
		found := int64(0)
		for number := range r.counts {
			found += r.counts[number].Load()
		}
		if found != seen {
			seen, r.end = found, time.Now()
		}
		say(map[string]int64{"seen": found})
	}
	for _, each := range taking {
		each.Stop()
	}
}

func (r *run) take(message jetstream.Msg) {
	body := message.Data()
	if r.Per_s > 0 {
		took := nanotime() - int64(binary.BigEndian.Uint64(body[8:]))
		r.lock.Lock()
		r.latencies = append(r.latencies, took)
		r.lock.Unlock()
	}
	r.counts[binary.BigEndian.Uint64(body)].Add(1)
	must(message.Ack())
}

// --- the report ----------------------------------------------------------------------------------------------------------

func (r *run) report() {
	end := r.end
	if end.IsZero() {
		end = time.Now()
	}
	parts := map[string]float64{}
	sort.Slice(r.latencies, func(a, b int) bool { return r.latencies[a] < r.latencies[b] })
	if count := len(r.latencies); count > 0 {
		for name, part := range map[string]float64{"p50": 0.5, "p99": 0.99, "p99.9": 0.999} {
			parts[name] = float64(r.latencies[min(int(float64(count)*part), count-1)]) / 1e6
		}
	}
	say(map[string]any{"done": map[string]any{
		"counts": r.numbers(), "seconds": end.Sub(r.begin).Seconds(), "cpu_s": cpu() - r.cpu, "latency_ms": parts}})
}

func (r *run) numbers() []int64 {
	counts := make([]int64, ring)
	sent := r.sent.Load()
	for number := range counts {
		if sent > 0 {
			counts[number] = sent / ring
			if int64(number) < sent%ring {
				counts[number]++
			}
		} else {
			counts[number] = r.counts[number].Load()
		}
	}
	return counts
}

func main() {
	var err error
	connection, err = nats.Connect("nats://" + os.Args[1])
	must(err)
	// A message that is not stored ends the row.
	failed := jetstream.WithPublishAsyncErrHandler(func(_ jetstream.JetStream, _ *nats.Msg, err error) { must(err) })
	stream, err = jetstream.New(connection, jetstream.WithPublishAsyncMaxPending(pending), failed)
	must(err)
	streamLarge, err = jetstream.New(connection, jetstream.WithPublishAsyncMaxPending(pendingLarge), failed)
	must(err)
	for {
		r := &run{phase: phase{Seconds: 5, Size: 100, Tasks: 1, Consumers: 1, Groups: 1, Prefix: "g"}}
		must(json.Unmarshal([]byte(hear()), &r.phase))
		for number := range r.bodies {
			r.bodies[number] = make([]byte, r.Size)
			_, err = rand.Read(r.bodies[number])
			must(err)
			binary.BigEndian.PutUint64(r.bodies[number], uint64(number))
		}
		map[string]func(){"make": r.make, "publish": r.publish, "awaited": r.awaited, "paced": r.paced, "consume": r.consume}[r.Work]()
		r.report()
	}
}
