// Command notifyd is the mail service: bridge, workers, sweeper and their HTTP
// side in one process. It is configured by the environment alone; "notifyd
// config" prints every variable.
//
// On stdout it writes JSON lines: {"msg":"listening","addr":…} once HTTP
// answers and {"msg":"ready"} once the whole path is up. SIGTERM and SIGINT
// drain; a second one stops at once.
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"mailproof/system/failpoint"
	"mailproof/system/notify"
	"mailproof/system/notify/config"
	"mailproof/system/notify/logging"
)

func main() {
	ctx, stop := untilSignalled()
	defer stop()
	if err := command(os.Stdout).ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "notifyd:", err)
		stop()
		os.Exit(1)
	}
}

// untilSignalled returns a context that ends with the first SIGTERM or SIGINT.
// The signals have their ordinary effect again before it ends, so that a second
// one ends the process.
func untilSignalled() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt)
	go func() {
		select {
		case <-signals:
		case <-ctx.Done():
		}
		signal.Stop(signals)
		cancel()
	}()
	return ctx, cancel
}

func command(out io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:           "notifyd",
		Short:         "Turns confirmed bookings into mails: nothing lost, at most one delivery",
		Long:          "notifyd reads booking events from Kafka, keeps one row per mail in Postgres, and sends mails from RabbitMQ queues.\nIt is configured by the environment; see notifyd config.",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withConfig(out, func(cfg config.Config, log *slog.Logger) error { return notify.Run(cmd.Context(), cfg, log) })
		},
	}
	root.AddCommand(
		campaignCommand(out), dlqCommand(out), sendAgainCommand(out), unknownCommand(out), traceCommand(out), outboxCommand(out), offsetsCommand(out),
		&cobra.Command{
			Use: "run", Short: "Run the service (as without a command)", Args: cobra.NoArgs,
			RunE: root.RunE,
		},
		&cobra.Command{
			Use: "migrate", Short: "Bring the database to the newest version", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				return withConfig(out, func(cfg config.Config, log *slog.Logger) error {
					return notify.Migrate(cmd.Context(), cfg, log)
				})
			},
		},
		&cobra.Command{
			Use: "config", Short: "Print every variable with its value, default and meaning, secrets masked", Args: cobra.NoArgs,
			RunE: func(*cobra.Command, []string) error {
				cfg, err := config.Load()
				if printErr := config.Describe(out, cfg); printErr != nil {
					return fmt.Errorf("print: %w", printErr)
				}
				return err
			},
		},
	)
	root.CompletionOptions.DisableDefaultCmd = true
	return root
}

// helpOnly is what a command does that has only subcommands. Cobra looks at the
// arguments only of one that can be run: without this a misspelt subcommand
// would print the help and succeed.
func helpOnly(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// withConfig reads the environment and runs f with it.
func withConfig(out io.Writer, f func(config.Config, *slog.Logger) error) error {
	if err := failpoint.Check(); err != nil {
		return err
	}
	cfg, err := config.Load()
	if err != nil {
		return err
	}
	log := logging.New(out, cfg.LogLevel).With("instance", cfg.Instance)
	for _, name := range config.Unknown() {
		log.Warn("this variable is set and nobody reads it", "variable", name)
	}
	return f(cfg, log)
}
