package main

import (
	"context"

	"github.com/spf13/cobra"
)

// exitUsage is the exit code for a command line that cannot be run, EX_USAGE of
// sysexits.h: the customary 2 is the verdict unknown here.
const exitUsage = 64

// usageError is a mistake in the command line; nothing was started.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

// usage marks an error as a mistake in the command line; nil stays nil.
func usage(err error) error {
	if err == nil {
		return nil
	}
	return usageError{err}
}

// markUsage lets a command and all below it mark what is wrong with flags and
// arguments.
func markUsage(c *cobra.Command) {
	c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(err) })
	if fits := c.Args; fits != nil {
		c.Args = func(c *cobra.Command, args []string) error { return usage(fits(c, args)) }
	}
	// cobra looks for required flags too late for a mark of its own.
	before := c.PreRunE
	c.PreRunE = func(c *cobra.Command, args []string) error {
		if err := c.ValidateRequiredFlags(); err != nil {
			return usage(err)
		}
		if before == nil {
			return nil
		}
		return before(c, args)
	}
	for _, sub := range c.Commands() {
		markUsage(sub)
	}
}

// execute runs the command line.
func execute(ctx context.Context, root *cobra.Command, args []string) error {
	if _, _, err := root.Find(args); err != nil {
		return usage(err)
	}
	markUsage(root)
	root.SetArgs(args)
	return root.ExecuteContext(ctx)
}
