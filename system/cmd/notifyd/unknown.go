package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/cobra"

	"mailproof/system/failpoint"
	"mailproof/system/notify"
	"mailproof/system/notify/config"
	"mailproof/system/notify/dlq"
	"mailproof/system/notify/logging"
)

func unknownCommand(out io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:   "unknown",
		Short: "Look at mails that were sent or not, and ask the provider",
		Long: "A mail is UNKNOWN when a server may have taken it and nobody here knows. It is never sent again without a proof\n" +
			"that no copy exists. The environment is that of the service; its log goes to stderr.",
		Args: cobra.NoArgs, RunE: helpOnly,
	}
	root.AddCommand(listUnknownCommand(out), reconcileCommand(out))
	return root
}

func listUnknownCommand(out io.Writer) *cobra.Command {
	limit, asJSON := 100, false
	cmd := &cobra.Command{
		Use: "list", Short: "List unknown mails, the longest unknown first", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return operateUnknown(cmd, func(ctx context.Context, u notify.Unknown) error {
				rows, err := u.List(ctx, limit)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(out, dlq.Views(rows))
				}
				for _, m := range dlq.Views(rows) {
					if _, err := fmt.Fprintf(out, "%s\t%s\t%d tries\t%s\n", m.DedupeKey, m.Recipient, m.Attempts, short(m.Error)); err != nil {
						return fmt.Errorf("print: %w", err)
					}
				}
				_, err = fmt.Fprintf(out, "%d unknown mails\n", len(rows))
				return err
			})
		},
	}
	cmd.Flags().IntVar(&limit, "limit", limit, "mails at most")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func reconcileCommand(out io.Writer) *cobra.Command {
	key := ""
	cmd := &cobra.Command{
		Use: "reconcile", Short: "Ask the provider now, as notifyd does by itself; safe to repeat", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return operateUnknown(cmd, func(ctx context.Context, u notify.Unknown) error {
				tally, err := u.Reconcile(ctx, key)
				if printErr := printJSON(out, tally); err == nil {
					err = printErr
				}
				if err == nil && key != "" && len(tally) == 0 {
					return fmt.Errorf("no mail with the key %q is UNKNOWN; notifyd trace %[1]s says what it is", key)
				}
				return err
			})
		},
	}
	cmd.Flags().StringVar(&key, "key", "", "one dedupe key; none means all")
	return cmd
}

func operateUnknown(cmd *cobra.Command, do func(context.Context, notify.Unknown) error) error {
	cfg, log, err := quietConfig(cmd)
	if err != nil {
		return err
	}
	return notify.OperateUnknown(cmd.Context(), cfg, log, do)
}

// withQuietConfig runs do for a command that only reads.
func withQuietConfig(cmd *cobra.Command, do func(context.Context, notify.Offline) error) error {
	cfg, log, err := quietConfig(cmd)
	if err != nil {
		return err
	}
	return notify.AskOffline(cmd.Context(), cfg, log, do)
}

// quietConfig reads the environment for a command: its answer is on stdout, the
// log on stderr.
func quietConfig(cmd *cobra.Command) (config.Config, *slog.Logger, error) {
	if err := failpoint.Check(); err != nil {
		return config.Config{}, nil, err
	}
	cfg, err := config.Load()
	if err != nil {
		return cfg, nil, err
	}
	return cfg, logging.New(cmd.ErrOrStderr(), max(cfg.LogLevel, slog.LevelWarn)).With("instance", cfg.Instance), nil
}
