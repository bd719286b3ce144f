package bus_test

import (
	"context"
	"fmt"
	"os"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/natsserver"
)

// A work queue stores a command, a handler on the Router runs it, and the caller receives the answer.
func Example() {
	if err := example(); err != nil {
		fmt.Println(err)
	}
	// Output:
	// delivery 1 of create
	// answer: created ses_1
}

func example() error {
	dir, err := os.MkdirTemp("", "bus")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	server, err := natsserver.Start(natsserver.Config{StoreDir: dir})
	if err != nil {
		return err
	}
	defer server.Shutdown()
	nc, err := server.Connect()
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for _, cfg := range []jetstream.StreamConfig{
		{Name: "COMMANDS", Subjects: []string{"cmd.>"}, Retention: jetstream.WorkQueuePolicy, Discard: jetstream.DiscardNew},
		{Name: "DEAD", Subjects: []string{"dead.>"}},
	} {
		if _, err := js.CreateStream(ctx, cfg); err != nil {
			return err
		}
	}

	dead, err := bus.NewPublisher(bus.PublisherConfig{JetStream: js, Deduplicate: true})
	if err != nil {
		return err
	}
	router, err := bus.NewRouter(bus.RouterConfig{DeadLetter: dead})
	if err != nil {
		return err
	}
	commands, err := bus.NewSubscriber(bus.SubscriberConfig{JetStream: js, Stream: "COMMANDS", Durable: "session", Concurrency: 8})
	if err != nil {
		return err
	}
	err = router.Handle("session", "cmd.session.>", commands, func(ctx context.Context, cmd *message.Message) error {
		if err := bus.RequireRouted(ctx); err != nil {
			return err
		}
		fmt.Printf("delivery %d of %s\n", bus.DeliveryCount(cmd), cmd.Payload)
		return bus.Reply(nc, cmd, bus.Answer{Payload: []byte("created ses_1")})
	})
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- router.Run(ctx) }()

	answer, err := bus.Request(ctx, js, bus.Command{Subject: "cmd.session.00.default.ses_1", ID: "cmd_1", Payload: []byte("create")})
	if err != nil {
		return err
	}
	fmt.Printf("answer: %s\n", answer.Payload)
	cancel()
	return <-ended
}
