package infra

import (
	"context"

	"golang.org/x/sync/errgroup"
)

// MendNodes starts, side by side, what does not run and resumes the rest; it
// returns when each node answers. A node that is not paused takes no harm.
func MendNodes(ctx context.Context, nodes ...Node) error {
	mending, ctx := errgroup.WithContext(ctx)
	for _, n := range nodes {
		mending.Go(func() error {
			if !n.Running() {
				return n.Restart(ctx)
			}
			return n.Resume(ctx)
		})
	}
	return mending.Wait()
}
