package infra

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
)

// Mend makes nodes whole, side by side, and then the cluster that some of them
// are, nil for none: it starts what does not run and resumes the rest, and
// returns when each node answers. A node that is not paused takes no harm. It is
// what a provider's [Stack] does.
func Mend(ctx context.Context, cluster RabbitMQ, nodes ...Node) error {
	mending, working := errgroup.WithContext(ctx)
	for _, n := range nodes {
		mending.Go(func() error {
			if !n.Running() {
				return n.Restart(working)
			}
			return n.Resume(working)
		})
	}
	err := mending.Wait()
	if c, ok := cluster.(interface{ Mend(context.Context) error }); ok && err == nil {
		err = c.Mend(ctx)
	}
	if err != nil {
		return fmt.Errorf("mend the stack: %w", err)
	}
	return nil
}
