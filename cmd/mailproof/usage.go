package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
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
	c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(inWords(err)) })
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

// inWords says what a number may be, where pflag names the function that could
// not read it.
func inWords(err error) error {
	var value *pflag.InvalidValueError
	var number *strconv.NumError
	if !errors.As(err, &value) || !errors.As(err, &number) {
		return err
	}
	kind := "whole number"
	if value.GetFlag().Value.Type() == "uint64" {
		kind = "whole number from 0 to 18446744073709551615"
	}
	return fmt.Errorf("--%s %q is no %s", value.GetFlag().Name, value.GetValue(), kind)
}

// writable reports whether a file could be written that is made only at the end
// of a long run. It makes the folder, and leaves no file.
func writable(file string) error {
	dir := filepath.Dir(file)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("%s cannot be written: %w", file, err)
	}
	if info, err := os.Stat(file); err == nil {
		if info.IsDir() {
			return fmt.Errorf("%s cannot be written: it is a folder", file)
		}
		f, err := os.OpenFile(file, os.O_WRONLY, 0)
		if err != nil {
			return fmt.Errorf("%s cannot be written: %w", file, err)
		}
		return f.Close()
	}
	probe, err := os.CreateTemp(dir, ".mailproof-")
	if err != nil {
		return fmt.Errorf("%s cannot be written: %w", file, err)
	}
	return errors.Join(probe.Close(), os.Remove(probe.Name()))
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
