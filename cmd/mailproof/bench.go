package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"mailproof/benchmarks"
)

type benchFlags struct {
	only    []string
	quick   bool
	repeats int
	seed    uint64
	out     string
	logs    string
	from    []string
	render  string
}

// benchDocument is where the document of a whole run belongs.
const benchDocument = "docs/benchmarks/m06-notification.md"

func benchCommand(binary string) *cobra.Command {
	var f benchFlags
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure the system on real parts, each figure beside its raw floor",
		Long: `Starts Postgres, three RabbitMQ nodes and Kafka, measures the system and, in the
same run, the same work done by bare clients, and writes a document with tables
and plots. All raw samples are in the JSON beside it, from which --render writes
the document again.

It begins by saying how long it will take on two idle cores, and ends after a
quarter of an hour, four minutes with --quick, whatever is left then. Nothing else
should run meanwhile: the document says how busy the machine was. What was measured
is written after each part; Ctrl-C keeps it and stops all servers.

Exit codes: 0 all was measured, 2 interrupted, 4 something was not measured (the
document says what), 64 a mistake in the command line.

Parts: ` + strings.Join(benchmarks.Parts(), ", ") + `.`,
		Example: `  mailproof bench                                     everything, into ` + benchDocument + `
  mailproof bench --quick --out runs/bench/quick.md   less of everything, elsewhere
  mailproof bench --only hops --repeats 5             one part
  mailproof bench --from runs/latest                  recovery from this chaos run
  mailproof bench --render docs/benchmarks/m06-notification.json
                                                      only write the document again`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.render != "" {
				return renderBench(f)
			}
			if cmd.Flags().Changed("only") && len(f.only) == 0 {
				return usage(errors.New("--only names no part; leave it out for all of them"))
			}
			if !cmd.Flags().Changed("seed") {
				f.seed = uint64(rand.Uint32())
			}
			return bench(cmd.Context(), binary, f, cmd.OutOrStdout())
		},
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&f.only, "only", nil, "only these parts, separated by commas: "+strings.Join(benchmarks.Parts(), ","))
	flags.BoolVar(&f.quick, "quick", false, "measure less of everything")
	flags.IntVar(&f.repeats, "repeats", 0, "repeats of each measurement (default 3, with --quick 2)")
	flags.Uint64Var(&f.seed, "seed", 0, "draw the same arrivals as an earlier run (default: new ones)")
	flags.StringVar(&f.out, "out", benchDocument, "the document; JSON and plots are written beside it")
	flags.StringVar(&f.logs, "logs", filepath.Join("runs", "bench"), "folder of the processes' logs")
	flags.StringSliceVar(&f.from, "from", nil, "folders of chaos runs whose evidence shows recovery (default runs/latest, if it is there)")
	flags.StringVar(&f.render, "render", "", "write the document of this JSON file again, measure nothing")
	return cmd
}

// renderBench writes the document beside the JSON that it is made from, unless
// --out says otherwise.
func renderBench(f benchFlags) error {
	result, err := benchmarks.Read(f.render)
	if err != nil {
		return err
	}
	out := f.out
	if out == benchDocument {
		out = strings.TrimSuffix(f.render, filepath.Ext(f.render)) + ".md"
	}
	return benchmarks.WriteDocument(result, out)
}

func (f benchFlags) again(binary string) string {
	words := []string{binary, "bench"}
	if f.quick {
		words = append(words, "--quick")
	}
	if len(f.only) > 0 {
		words = append(words, "--only", strings.Join(f.only, ","))
	}
	if f.repeats > 0 {
		words = append(words, "--repeats", fmt.Sprint(f.repeats))
	}
	if f.out != benchDocument {
		words = append(words, "--out", f.out)
	}
	if len(f.from) > 0 {
		words = append(words, "--from", strings.Join(f.from, ","))
	}
	return strings.Join(append(words, "--seed", fmt.Sprint(f.seed)), " ")
}

func bench(ctx context.Context, binary string, f benchFlags, out io.Writer) error {
	if err := benchmarks.Knows(f.only); err != nil {
		return usage(fmt.Errorf("--only: %w", err))
	}
	if err := writable(f.out); err != nil {
		return usage(fmt.Errorf("--out: %w", err))
	}
	show := &benchLines{out: out, began: time.Now()}
	show.say(fmt.Sprintf("seed %d, the same again: %s", f.seed, f.again(binary)))
	if len(f.from) == 0 {
		if latest := filepath.Join("runs", "latest"); exists(latest) {
			f.from = []string{latest}
		}
	}
	err := benchmarks.Run(ctx, benchmarks.Config{
		Out: f.out, Logs: f.logs, Only: f.only, Quick: f.quick, Repeats: f.repeats, Seed: f.seed, From: f.from,
		Command: f.again(binary), Revision: version(), Say: show.say,
		Part: func(part, state string) { show.say(part + " " + state) },
	})
	written, _ := os.Stat(f.out) // no error but "not there" can be, and that says it
	measured := written != nil && !written.ModTime().Before(show.began.Truncate(time.Second))
	switch {
	case errors.Is(err, errInterrupted) && measured:
		show.say("interrupted, all servers are stopped; what was measured until then: " + f.out)
	case errors.Is(err, errInterrupted):
		show.say("interrupted before anything was measured; all servers are stopped")
	case measured:
		show.say("document: " + f.out)
	}
	return err
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// benchLines prints what a run does, each line with the time since its start.
type benchLines struct {
	out   io.Writer
	began time.Time
	mu    sync.Mutex
}

func (b *benchLines) say(line string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	fmt.Fprintf(b.out, "%5.0fs  %s\n", time.Since(b.began).Seconds(), line)
}
