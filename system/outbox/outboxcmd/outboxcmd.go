// Package outboxcmd is the command "outbox" of the services that have one: what
// waits, what is dead, and its revival. It holds no rule of its own.
package outboxcmd

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"mailproof/system/outbox"
)

// Open returns a connection to the outbox's database, and what closes it.
type Open func(ctx context.Context) (outbox.Operator, func(), error)

// limit of a list.
const limit = 1000

// New makes the command.
func New(out io.Writer, open Open) *cobra.Command {
	root := &cobra.Command{
		Use: "outbox", Short: "Look at the outbox's events, and let dead ones be tried again", Args: cobra.NoArgs,
		// Cobra looks at the arguments only of a command that can be run: without
		// this a misspelt subcommand would print the help and succeed.
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	asJSON := false
	root.PersistentFlags().BoolVar(&asJSON, "json", false, "print JSON")
	list := func(cmd *cobra.Command, ask func(context.Context, outbox.Operator) ([]outbox.Entry, error)) error {
		db, done, err := open(cmd.Context())
		if err != nil {
			return err
		}
		defer done()
		entries, err := ask(cmd.Context(), db)
		if err != nil {
			return err
		}
		return show(out, entries, asJSON)
	}
	root.AddCommand(
		&cobra.Command{
			Use: "dead", Short: "List events that the broker refused too often", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				return list(cmd, func(ctx context.Context, db outbox.Operator) ([]outbox.Entry, error) {
					return outbox.ListDead(ctx, db, limit)
				})
			},
		},
		&cobra.Command{
			Use: "find BOOKING", Short: "List the events of a booking that the outbox still has", Args: cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				return list(cmd, func(ctx context.Context, db outbox.Operator) ([]outbox.Entry, error) {
					return outbox.Find(ctx, db, args[0], limit)
				})
			},
		},
		&cobra.Command{
			Use: "revive EVENT_ID", Short: "Let the relay publish a dead event after all, once the cause is gone", Args: cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				id, err := uuid.Parse(args[0])
				if err != nil {
					return fmt.Errorf("event id %q: %w", args[0], err)
				}
				db, done, err := open(cmd.Context())
				if err != nil {
					return err
				}
				defer done()
				if err := outbox.Revive(cmd.Context(), db, id); err != nil {
					return err
				}
				_, err = fmt.Fprintf(out, "%s is to be published again\n", id)
				return err
			},
		},
	)
	return root
}

func show(out io.Writer, entries []outbox.Entry, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(entries)
	}
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "EVENT\tTYPE\tKEY\tWRITTEN\tSTATE\tERROR")
	for _, e := range entries {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", e.EventID, e.Type, e.Key, stamp(e.CreatedAt), state(e), e.LastError)
	}
	fmt.Fprintf(w, "%d events\n", len(entries))
	return w.Flush()
}

func state(e outbox.Entry) string {
	switch {
	case e.DeadAt != nil:
		return fmt.Sprintf("dead after %d tries, %s", e.Attempts, stamp(*e.DeadAt))
	case e.PublishedAt != nil:
		return "published " + stamp(*e.PublishedAt)
	case e.Attempts > 0:
		return fmt.Sprintf("waits, %d tries failed", e.Attempts)
	default:
		return "waits"
	}
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }
