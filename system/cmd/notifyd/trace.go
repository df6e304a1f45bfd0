package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"mailproof/system/notify"
	"mailproof/system/notify/config"
	"mailproof/system/notify/trace"
	"mailproof/system/outbox"
	"mailproof/system/outbox/outboxcmd"
)

func traceCommand(out io.Writer) *cobra.Command {
	asJSON := false
	cmd := &cobra.Command{
		Use:   "trace KEY|BOOKING",
		Short: "Tell the story of a mail, or of all mails of a booking: what happened when, and why",
		Long: "Reads the rows, alerts, mail events, the audit and, where NOTIFYD_PROVIDER_LOG_URL is set, the provider's log.\n" +
			"It changes nothing.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withQuietConfig(cmd, func(ctx context.Context, o notify.Offline) error {
				s, err := o.Trace(ctx, args[0])
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(out, s)
				}
				return printStory(out, s)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// outboxCommand is about the mail events.
func outboxCommand(out io.Writer) *cobra.Command {
	return outboxcmd.New(out, func(ctx context.Context) (outbox.Operator, func(), error) {
		cfg, err := config.Load()
		if err != nil {
			return nil, nil, err
		}
		pool, err := notify.Pool(ctx, cfg)
		if err != nil {
			return nil, nil, err
		}
		return pool, pool.Close, nil
	})
}

const clockLayout = "2006-01-02 15:04:05.000"

func printStory(out io.Writer, s trace.Story) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "KEY\tSTATE\tTRIES\tOPEN\tRECIPIENT\tPROVIDER ID")
	for _, m := range s.Mails {
		fmt.Fprintf(w, "%s\t%s\t%d of %d\t%d\t%s\t%s\n", m.DedupeKey, m.Status, m.Attempts, m.Limit, m.Open(), m.Recipient, m.ProviderID)
	}
	fmt.Fprintln(w)
	for _, m := range s.Timeline {
		fmt.Fprintf(w, "%s\t%s\t%s\n", m.At.Format(clockLayout), m.Key, m.What)
	}
	for _, m := range s.Mails {
		for _, l := range m.Provider {
			fmt.Fprintf(w, "provider's log\t%s\t%s, session %s, id %s\n", m.DedupeKey, l.Event, l.Session, l.ProviderID)
		}
	}
	fmt.Fprintln(w)
	for _, f := range s.Findings {
		fmt.Fprintln(w, "- "+f)
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("print: %w", err)
	}
	return nil
}
