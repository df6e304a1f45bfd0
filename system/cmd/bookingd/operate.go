package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"mailproof/system/booking"
	"mailproof/system/failpoint"
	"mailproof/system/outbox"
	"mailproof/system/outbox/outboxcmd"
)

// openForCommand reads the environment of the service and connects.
func openForCommand() (config, *pgxpool.Pool, error) {
	cfg, err := load(nil)
	if err != nil {
		return cfg, nil, err
	}
	if err := failpoint.Check(); err != nil {
		return cfg, nil, err
	}
	pool, err := openPool(cfg)
	return cfg, pool, err
}

func outboxCommand(out io.Writer) *cobra.Command {
	return outboxcmd.New(out, func(context.Context) (outbox.Operator, func(), error) {
		_, pool, err := openForCommand()
		if err != nil {
			return nil, nil, err
		}
		return pool, pool.Close, nil
	})
}

func reEmitCommand(out, errOut io.Writer) *cobra.Command {
	leftovers, age, dryRun := false, 5*time.Minute, false
	cmd := &cobra.Command{
		Use:   "re-emit [BOOKING…]",
		Short: "Write the event of a booking's present state once more, for one that never arrived",
		Long: "The event gets a new event_id and the same dedupe key: where the first one did arrive it changes nothing.\n" +
			"--leftovers means every booking that was cancelled a while ago and of whose mail nobody has said\n" +
			"that it is cancelled, that it was too late, or that it came back.",
		RunE: func(cmd *cobra.Command, ids []string) error {
			if leftovers == (len(ids) > 0) {
				return errors.New("name bookings, or --leftovers")
			}
			cfg, pool, err := openForCommand()
			if err != nil {
				return err
			}
			defer pool.Close()
			service := booking.NewService(pool, booking.ServiceConfig{
				Topic: cfg.KafkaTopic, Timeout: cfg.RequestTimeout, Log: logger(errOut, cfg),
			})
			if leftovers {
				if ids, err = service.Leftovers(cmd.Context(), age); err != nil {
					return err
				}
			}
			return reEmit(cmd.Context(), out, service, ids, dryRun)
		},
	}
	cmd.Flags().BoolVar(&leftovers, "leftovers", false, "all cancelled bookings without an answer about their mail")
	cmd.Flags().DurationVar(&age, "older-than", age, "with --leftovers: cancelled for at least so long; above the lag of both topics")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "say which, and write nothing")
	return cmd
}

func reEmit(ctx context.Context, out io.Writer, s *booking.Service, ids []string, dryRun bool) error {
	written := 0
	for _, id := range ids {
		if dryRun {
			fmt.Fprintln(out, id)
			continue
		}
		event, kind, err := s.ReEmit(ctx, id)
		switch {
		case err != nil:
			return fmt.Errorf("after %d of %d: %w", written, len(ids), err)
		case kind == "":
			fmt.Fprintf(out, "%s\tno event: it was never confirmed\n", id)
		default:
			written++
			fmt.Fprintf(out, "%s\t%s\t%s\n", id, kind, event)
		}
	}
	_, err := fmt.Fprintf(out, "%d of %d bookings re-emitted\n", written, len(ids))
	return err
}
