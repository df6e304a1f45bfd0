// Command mailproof runs a notification system against faults on real parts and
// says from evidence whether mail was lost or doubled.
//
// This package is thin: it reads flags, prints, and turns a verdict into the
// exit code. What a run does is in package scenarios.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"mailproof/fakes/cli"
	"mailproof/infra/guardian"
	"mailproof/verify"
)

func main() {
	guardian.MaybeRun()
	os.Exit(run(os.Args))
}

// errInterrupted is the cause of a context that Ctrl-C or SIGTERM ended.
var errInterrupted = errors.New("interrupted")

// verdictError carries a verdict to the exit code; everything there is to say
// has been printed.
type verdictError struct{ verdict verify.Verdict }

func (e verdictError) Error() string { return string(e.verdict) }

func run(args []string) int {
	ctx, stop := interruptible(os.Stderr)
	defer stop()
	return exitCode(execute(ctx, rootCommand(args[0]), args[1:]), os.Stderr)
}

// exitCode of the binary: a verdict's own, [exitUsage] for a mistake in the
// command line, else that of a harness error.
func exitCode(err error, stderr interface{ WriteString(string) (int, error) }) int {
	var v verdictError
	var judged cli.Verdict
	var mistake usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &v):
		return v.verdict.ExitCode()
	case errors.As(err, &judged):
		_, _ = stderr.WriteString(judged.Text + "\n")
		return judged.Code
	case errors.Is(err, errInterrupted):
		return verify.Unknown.ExitCode()
	case errors.As(err, &mistake):
		_, _ = stderr.WriteString("mailproof: " + strings.TrimSpace(err.Error()) + "\n--help says what there is\n")
		return exitUsage
	}
	_, _ = stderr.WriteString("mailproof: " + err.Error() + "\n")
	return verify.HarnessError.ExitCode()
}

// interruptible ends its context at the first Ctrl-C or SIGTERM, so that the
// run heals and stops what it started. A second one ends the process at once;
// the guardian cleans up.
func interruptible(stderr *os.File) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		if _, ok := <-signals; !ok {
			return
		}
		fmt.Fprintln(stderr, "\ninterrupted: keeping what there is and stopping all servers; once more to leave at once")
		cancel(errInterrupted)
		if _, ok := <-signals; ok {
			os.Exit(128 + int(syscall.SIGINT))
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(signals)
		cancel(nil)
	}
}

func rootCommand(binary string) *cobra.Command {
	root := &cobra.Command{
		Use:   "mailproof",
		Short: "Proves from evidence that no mail is lost and none is delivered twice",
		Long: `mailproof runs a complete notification system (outbox, Kafka, RabbitMQ quorum
queues, workers, SMTP) beside a mail server that misbehaves on purpose, breaks
every part of it, and judges from evidence.

Exit codes: 0 pass or skipped, 1 fail, 2 unknown or interrupted, 3 invalid,
4 harness error, 64 a mistake in the command line (nothing was started), 130 left
at a second Ctrl-C.`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(
		chaosCommand(binary), crashTableCommand(binary), gateCommand(binary), benchCommand(binary), checkCommand(), doctorCommand(), setupCommand(),
		mutantsCommand(binary), upCommand(), versionCommand(),
	)
	root.AddCommand(cli.Commands()...)
	return root
}
