// Package stand lets the whole system stand for a person to try things on: real
// parts, bookingd and notifyd, and the fake mail server with its page. Everything
// is thrown away at the end.
package stand

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"mailproof/fakes/smtp"
	"mailproof/history"
	"mailproof/infra"
	"mailproof/infra/processes"
	"mailproof/internal/setup"
	"mailproof/target"
)

// Config of a stand.
type Config struct {
	// Dir receives the logs and the environment files.
	Dir string
	// Policy of ticket mails for an outcome that is not known.
	Policy string
	// Out is told what is waited for, and at the end how to use it.
	Out io.Writer
}

// The short delays let a person see a mail die within seconds.
var delays = []time.Duration{time.Second, 2 * time.Second, 4 * time.Second}

// Check refuses a configuration that would fail only when the parts have started.
func (c Config) Check() error {
	switch c.Policy {
	case "resend", "hold", "same-key":
		return nil
	}
	return fmt.Errorf("policy %q is none of resend, hold, same-key", c.Policy)
}

// Run starts everything, says how to use it, and stops it when ctx ends.
func Run(ctx context.Context, cfg Config) (err error) {
	if err := cfg.Check(); err != nil {
		return fmt.Errorf("up: %w", err)
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return fmt.Errorf("up: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("up: %w", err)
	}
	began := time.Now()
	stack, err := processes.New(setup.Locate()).Start(ctx, infra.Spec{
		LogDir: dir,
		Progress: func(part, state string) {
			fmt.Fprintf(cfg.Out, "%5.1f s  %s: %s\n", time.Since(began).Seconds(), part, state)
		},
	})
	if err != nil {
		return fmt.Errorf("up: %w", err)
	}
	stop := context.WithoutCancel(ctx)
	defer func() { err = errors.Join(err, stack.Stop(stop)) }()
	server, err := smtp.Start(smtp.Options{Seed: 1, Clock: history.Now, HTTPAddr: "127.0.0.1:0"})
	if err != nil {
		return fmt.Errorf("up: mail server: %w", err)
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	p, err := target.StartPipeline(ctx, target.PipelineConfig{
		Stack: stack, Name: "up", SMTPAddr: server.Addr(), LogDir: dir, BinDir: filepath.Join(dir, "bin"), Policy: cfg.Policy, RetryDelays: delays,
		SendDeadline: 5 * time.Second, Lease: 10 * time.Second, SweepEvery: 5 * time.Second, SweepGrace: 15 * time.Second,
		ProviderLog: server.URL() + "/log", Record: func(history.Record) {},
	})
	if err != nil {
		return fmt.Errorf("up: %w", err)
	}
	defer func() { err = errors.Join(err, p.Stop(stop)) }()
	env, err := writeEnv(dir, p, server.URL())
	if err != nil {
		return fmt.Errorf("up: %w", err)
	}
	// Its addresses and passwords mean nothing afterwards.
	defer func() { err = errors.Join(err, os.Remove(env)) }()
	explain(cfg.Out, p, server, stack, dir, env)
	<-ctx.Done()
	return nil
}

// writeEnv makes the file from which a shell takes the services' environment.
func writeEnv(dir string, p *target.Pipeline, fake string) (string, error) {
	var b strings.Builder
	for _, process := range []string{"bookingd-1", "notifyd-1"} {
		for _, kv := range p.Environment(process) {
			name, value, _ := strings.Cut(kv, "=")
			if strings.HasPrefix(name, "BOOKINGD_") || strings.HasPrefix(name, "NOTIFYD_") {
				fmt.Fprintf(&b, "export %s=%s\n", name, quote(value))
			}
		}
	}
	fmt.Fprintf(&b, "export PATH=%s:\"$PATH\"\n", quote(filepath.Dir(p.Binaries().Notifyd)))
	fmt.Fprintf(&b, "export BOOKINGD=http://%s NOTIFYD=http://%s FAKE=%s\n", p.Addr("bookingd-1"), p.Addr("notifyd-1"), fake)
	path := filepath.Join(dir, "env")
	// Only for the one who started it: the URLs carry passwords.
	return path, os.WriteFile(path, []byte(b.String()), 0o600)
}

// quote for a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func explain(w io.Writer, p *target.Pipeline, server *smtp.Server, stack infra.Stack, dir, env string) {
	fmt.Fprintf(w, `
bookingd   http://%s      log %s
notifyd    http://%s      log %s
mail page  %s
Kafka      %s, topic %s, group %s

In another shell:

  . %s
  curl -sd '{"id":"b1","recipient":"guest@example.test","event":"Final"}' $BOOKINGD/bookings
  curl -sX POST $BOOKINGD/bookings/b1/confirm
  curl -s $BOOKINGD/bookings/b1                  # what became of the mail
  notifyd trace ticket:b1                        # its whole story
  curl -sd '[{"action":{"kind":"reply","stage":"rcpt","code":550}}]' $FAKE/rules     # now every mail dies
  notifyd dlq list
  curl -sX DELETE $FAKE/rules; notifyd dlq replay --all --actor me
  curl -s $NOTIFYD/metrics | grep ^notifyd_

Ctrl-C ends it and removes everything but the logs in %s.
`, p.Addr("bookingd-1"), filepath.Join(dir, "bookingd-1.log"), p.Addr("notifyd-1"), filepath.Join(dir, "notifyd-1.log"),
		server.URL(), strings.Join(stack.Kafka().Brokers(), ","), p.Topic(), p.Group(), env, dir)
}
