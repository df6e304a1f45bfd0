// Command bookingd keeps bookings, answers clients over HTTP, and publishes what
// happens to bookings through its outbox.
//
//	bookingd           the service (also "bookingd serve")
//	bookingd migrate   bring the database up to date
//	bookingd config    list the environment variables
//	bookingd outbox    look at events, let dead ones be tried again
//	bookingd re-emit   write the event of a booking's state once more
//
// On stdout it writes JSON lines: {"msg":"listening","addr":…} once HTTP answers
// and {"msg":"ready"} once bookings can be made. SIGTERM and SIGINT drain; a
// second one stops at once.
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

	"mailproof/system/booking"
	"mailproof/system/envconfig"
	"mailproof/system/failpoint"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	// The second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bookingd:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use:           "bookingd",
		Short:         "The booking service: bookings over HTTP, events through an outbox",
		Args:          cobra.NoArgs,
		RunE:          runService,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(
		outboxCommand(os.Stdout), reEmitCommand(os.Stdout, os.Stderr),
		&cobra.Command{
			Use: "serve", Aliases: []string{"run"}, Short: "Run the service until SIGTERM (as without a command)", Args: cobra.NoArgs,
			RunE: runService,
		},
		&cobra.Command{
			Use: "migrate", Short: "Bring the database up to date", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				url, err := loadDatabaseURL(nil)
				if err != nil {
					return err
				}
				return booking.Migrate(cmd.Context(), url)
			},
		},
		&cobra.Command{
			Use: "config", Short: "List the environment variables, with the values now in force", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				cfg, err := load(nil)
				if werr := envconfig.Describe(cmd.OutOrStdout(), prefix, cfg); werr != nil {
					return werr
				}
				return err
			},
		},
	)
	root.CompletionOptions.DisableDefaultCmd = true
	return root
}

func runService(cmd *cobra.Command, _ []string) error {
	cfg, err := load(nil)
	if err != nil {
		return err
	}
	if err := failpoint.Check(); err != nil {
		return err
	}
	return serve(cmd.Context(), cfg, logger(cmd.OutOrStdout(), cfg))
}

func logger(w io.Writer, cfg config) *slog.Logger {
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: cfg.LogLevel})).
		With("service", "bookingd", "instance", cfg.Instance)
}
