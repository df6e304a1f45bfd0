// Command plantable turns the looks that tests with PLANS_OUT wrote into a
// Markdown document on its standard output:
//
//	PLANS_OUT=plans.jsonl go test -run TestNoStatementScansTheTable ./system/...
//	go run ./system/plantest/plantable plans.jsonl > docs/statement-plans.md
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"mailproof/system/plantest"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "plantable:", err)
		os.Exit(1)
	}
}

const head = `# The plans of the statements

Written by ` + "`make plans`" + `, which runs TestNoStatementScansTheTable of system/delivery, system/outbox and
system/booking with %d rows in the large tables. Each statement was executed as a prepared statement with the
plan for the values at hand (custom) and with the one for any values (generic); of several calls the one that
examined most rows counts. The test fails for a sequential scan of a table of more than a thousand rows, and for
more rows than the statement's limit or the number of rows in the state that it asks about explains.

*Rows* are those that scans read, filtered ones included (*filtered* says how many). *Pages* are 8 KiB each, for
scans, locks, changed rows and their index entries together. Times are for information: the machine had other
work. "+ event" is the same statement where it writes the mail event as well.
`

func run(files []string, w io.Writer) error {
	var looks []plantest.Look
	for _, f := range files {
		more, err := read(f)
		if err != nil {
			return err
		}
		looks = append(looks, more...)
	}
	if len(looks) == 0 {
		return fmt.Errorf("no looks in %v", files)
	}
	most := slices.MaxFunc(looks, func(a, b plantest.Look) int { return a.Rows - b.Rows })
	if _, err := fmt.Fprintf(w, head, most.Rows); err != nil {
		return err
	}
	var stores []string
	for _, l := range looks {
		if !slices.Contains(stores, l.Store) {
			stores = append(stores, l.Store)
		}
	}
	slices.Sort(stores)
	for _, s := range stores {
		if err := table(w, s, looks); err != nil {
			return err
		}
	}
	return nil
}

func read(file string) ([]plantest.Look, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var looks []plantest.Look
	for sc := bufio.NewScanner(f); ; {
		if !sc.Scan() {
			return looks, sc.Err()
		}
		var l plantest.Look
		if err := json.Unmarshal(sc.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		looks = append(looks, l)
	}
}

// table of one store. Two plans that look the same are one line.
func table(w io.Writer, store string, looks []plantest.Look) error {
	var of []plantest.Look
	for _, l := range looks {
		if l.Store == store {
			of = append(of, l)
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n## system/%s\n\n| statement | plan | reads by | rows | filtered | pages | ms |\n|---|---|---|--:|--:|--:|--:|\n", store)
	for i := 0; i < len(of); i++ {
		l := of[i]
		if i+1 < len(of) && of[i+1].Statement == l.Statement && slices.Equal(of[i+1].Nodes, l.Nodes) && of[i+1].Examined == l.Examined {
			l.Plan, l.Buffers = "both", max(l.Buffers, of[i+1].Buffers)
			l.Millis = max(l.Millis, of[i+1].Millis)
			i++
		}
		nodes := strings.Join(l.Nodes, ", ")
		if nodes == "" {
			nodes = "–"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %d | %d | %d | %.2f |\n", l.Statement, l.Plan, nodes, l.Examined, l.Removed, l.Buffers, l.Millis)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
