// Command up starts every part, prints where it listens, and stops them at the
// end of its input or on Ctrl-C. It is a tool for people who work on the
// provider.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"mailproof/infra"
	"mailproof/infra/guardian"
	"mailproof/infra/processes"
	"mailproof/internal/setup"
)

func main() {
	guardian.MaybeRun()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "up:", err)
		os.Exit(1)
	}
}

func run() error {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	logs, err := os.MkdirTemp("", "mp-logs-")
	if err != nil {
		return err
	}
	began := time.Now()
	stack, err := processes.New(setup.Locate()).Start(ctx, infra.Spec{
		LogDir:   logs,
		Progress: func(part, state string) { fmt.Printf("%6.1fs %s: %s\n", time.Since(began).Seconds(), part, state) },
	})
	if err != nil {
		return err
	}
	fmt.Printf("versions  %+v\npostgres  %s\nrabbitmq  %v\nkafka     %v\nlogs      %s\nCtrl-C ends it.\n",
		stack.Versions(), stack.Postgres().URL("postgres"), stack.RabbitMQ().URLs(""), stack.Kafka().Brokers(), logs)
	<-ctx.Done()
	stopping, cancelStop := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancelStop()
	return stack.Stop(stopping)
}
