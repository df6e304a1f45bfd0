// Package plantest looks at how Postgres really runs the system's statements:
// which nodes the plan has, how many rows it examined and how many pages it
// touched. It is for tests only and knows no statement.
//
// It guarantees that a statement is looked at under both plans that a prepared
// statement may get, the one for the values at hand and the generic one, and
// that looking changes nothing: each look is undone. It must not import any
// other package of the system.
package plantest

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// The environment of a run.
const (
	rowsEnv = "PLANS_ROWS"
	outEnv  = "PLANS_OUT"
)

// Rows is how many rows the large tables of a test should have: PLANS_ROWS, or
// def when it is not set.
func Rows(tb testing.TB, def int) int {
	tb.Helper()
	text := os.Getenv(rowsEnv)
	if text == "" {
		return def
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1000 {
		tb.Fatalf("%s=%q: not a number of at least 1000", rowsEnv, text)
	}
	return n
}

// Look is what was seen of one statement under one plan.
type Look struct {
	Store     string   `json:"store"`
	Statement string   `json:"statement"`
	Rows      int      `json:"rows"` // of the large tables
	Plan      string   `json:"plan"` // custom or generic
	Nodes     []string `json:"nodes"`
	// Examined counts the rows that the scans read: those they passed on and
	// those a filter took away. Scans of tables that are small by nature (below
	// a thousand rows) do not count.
	Examined int64 `json:"examined"`
	Removed  int64 `json:"removed"` // by filters, of Examined
	// Buffers are pages of 8 KiB, from the cache or read.
	Buffers int64 `json:"buffers"`
	// Millis of the execution; nothing is judged by it.
	Millis float64 `json:"millis"`
}

// Explainer is what a store runs its statements on: each is looked at, then run
// on the transaction. Of several calls of a statement the look that examined
// most rows is kept.
type Explainer struct {
	tb     testing.TB
	tx     pgx.Tx
	store  string
	rows   int
	small  map[string]bool
	looks  map[string]Look
	suffix string
}

// New makes an explainer for the statements of a store. The tables must have
// been filled and analysed; rows says how far.
func New(tb testing.TB, tx pgx.Tx, store string, rows int) *Explainer {
	tb.Helper()
	e := &Explainer{tb: tb, tx: tx, store: store, rows: rows, small: map[string]bool{}, looks: map[string]Look{}}
	found, err := tx.Query(tb.Context(), `SELECT relname FROM pg_class WHERE relkind = 'r' AND reltuples < 1000`)
	if err != nil {
		tb.Fatal(err)
	}
	names, err := pgx.CollectRows(found, pgx.RowTo[string])
	if err != nil {
		tb.Fatal(err)
	}
	for _, n := range names {
		e.small[n] = true
	}
	return e
}

// Suffix is added to the names of the statements that follow, to tell variants
// apart.
func (e *Explainer) Suffix(s string) { e.suffix = s }

// Query looks, then queries.
func (e *Explainer) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	e.Explain(nameOf(sql), sql, args...)
	return e.tx.Query(ctx, sql, args...)
}

// Exec looks, then executes.
func (e *Explainer) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	e.Explain(nameOf(sql), sql, args...)
	return e.tx.Exec(ctx, sql, args...)
}

// nameOf a statement stands in its first line.
func nameOf(sql string) string {
	return strings.TrimPrefix(strings.SplitN(sql, "\n", 2)[0], "-- ")
}

// Explain looks at a statement under both plans and undoes what it did.
func (e *Explainer) Explain(name, sql string, args ...any) {
	e.tb.Helper()
	ctx := e.tb.Context()
	for _, plan := range []string{"custom", "generic"} {
		e.exec(ctx, "SAVEPOINT look")
		e.exec(ctx, "SET LOCAL plan_cache_mode = force_"+plan+"_plan")
		e.exec(ctx, "PREPARE looked_at AS "+sql)
		look := e.look(ctx, args)
		e.exec(ctx, "DEALLOCATE looked_at")
		e.exec(ctx, "ROLLBACK TO SAVEPOINT look")
		look.Store, look.Statement, look.Rows, look.Plan = e.store, name+e.suffix, e.rows, plan
		key := look.Statement + " " + plan
		if old, ok := e.looks[key]; !ok || look.Examined > old.Examined {
			e.looks[key] = look
		}
	}
}

func (e *Explainer) exec(ctx context.Context, sql string) {
	e.tb.Helper()
	if _, err := e.tx.Exec(ctx, sql); err != nil {
		e.tb.Fatalf("%s: %v", sql, err)
	}
}

// look executes the prepared statement. EXECUTE takes no parameters of its own,
// so the values are written out, as the simple protocol does.
func (e *Explainer) look(ctx context.Context, args []any) Look {
	e.tb.Helper()
	sql := "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE looked_at"
	if len(args) > 0 {
		places := make([]string, len(args))
		for i := range args {
			places[i] = fmt.Sprintf("$%d", i+1)
		}
		sql += "(" + strings.Join(places, ", ") + ")"
	}
	var text []byte
	if err := e.tx.QueryRow(ctx, sql, append([]any{pgx.QueryExecModeSimpleProtocol}, literals(args)...)...).Scan(&text); err != nil {
		e.tb.Fatalf("%s: %v", sql, err)
	}
	var out []struct {
		Plan          node    `json:"Plan"`
		ExecutionTime float64 `json:"Execution Time"`
	}
	if err := json.Unmarshal(text, &out); err != nil || len(out) != 1 {
		e.tb.Fatalf("%s: %v: %s", sql, err, text)
	}
	l := Look{Buffers: out[0].Plan.Hit + out[0].Plan.Read, Millis: out[0].ExecutionTime}
	out[0].Plan.walk(&l, e.small)
	return l
}

// literals turns each value into text, for the server to read as whatever type
// the statement wants.
func literals(args []any) []any {
	out := make([]any, len(args))
	for i, a := range args {
		v := reflect.ValueOf(a)
		if !v.IsValid() || v.Kind() != reflect.Slice || v.Type().Elem().Kind() == reflect.Uint8 {
			out[i] = literal(a)
			continue
		}
		texts := make([]any, v.Len())
		for j := range texts {
			texts[j] = literal(v.Index(j).Interface())
		}
		out[i] = array(texts)
	}
	return out
}

// array in Postgres' own notation.
func array(elements []any) string {
	texts := make([]string, len(elements))
	for i, e := range elements {
		switch v := e.(type) {
		case string:
			texts[i] = strconv.Quote(v)
		case []byte:
			texts[i] = strconv.Quote(`\x` + hex.EncodeToString(v))
		default:
			texts[i] = "NULL"
		}
	}
	return "{" + strings.Join(texts, ",") + "}"
}

// literal is a string, bytes as they are, or nil.
func literal(a any) any {
	switch v := a.(type) {
	case nil, []byte:
		return v
	case time.Duration:
		return strconv.FormatInt(v.Microseconds(), 10) + " microseconds"
	case time.Time:
		return v.Format(time.RFC3339Nano)
	}
	v := reflect.ValueOf(a)
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return nil
		}
		return literal(v.Elem().Interface())
	}
	return fmt.Sprint(a)
}

// node of a plan, as EXPLAIN prints it.
type node struct {
	Type     string  `json:"Node Type"`
	Relation string  `json:"Relation Name"`
	Index    string  `json:"Index Name"`
	Rows     float64 `json:"Actual Rows"`
	Loops    float64 `json:"Actual Loops"`
	Filtered float64 `json:"Rows Removed by Filter"`
	Recheck  float64 `json:"Rows Removed by Index Recheck"`
	Hit      int64   `json:"Shared Hit Blocks"`
	Read     int64   `json:"Shared Read Blocks"`
	Plans    []node  `json:"Plans"`
}

func (n node) walk(l *Look, small map[string]bool) {
	if n.Relation != "" && n.Type != "ModifyTable" {
		text := n.Type + " on " + n.Relation
		if n.Index != "" {
			text = n.Type + " on " + n.Index
		}
		if !slices.Contains(l.Nodes, text) {
			l.Nodes = append(l.Nodes, text)
		}
		if !small[n.Relation] {
			removed := int64(n.Loops * (n.Filtered + n.Recheck))
			l.Examined += int64(n.Loops*n.Rows) + removed
			l.Removed += removed
		}
	} else if n.Type == "Bitmap Index Scan" {
		l.Nodes = append(l.Nodes, n.Type+" on "+n.Index)
	}
	for _, p := range n.Plans {
		p.walk(l, small)
	}
}

// Check fails the test for each look that read a whole table of more than a
// thousand rows, and for each that examined more rows than bound allows for its
// statement. It appends the looks to the file that PLANS_OUT names, if any.
func (e *Explainer) Check(bound func(statement string) int64) {
	e.tb.Helper()
	var looks []Look
	for _, l := range e.looks {
		looks = append(looks, l)
		for _, n := range l.Nodes {
			if table, ok := strings.CutPrefix(n, "Seq Scan on "); ok && !e.small[table] {
				e.tb.Errorf("%s (%s plan): %s", l.Statement, l.Plan, n)
			}
		}
		if most := bound(strings.TrimSuffix(l.Statement, e.suffix)); l.Examined > most {
			e.tb.Errorf("%s (%s plan): examined %d rows, %d removed by filters, the bound is %d: %s",
				l.Statement, l.Plan, l.Examined, l.Removed, most, strings.Join(l.Nodes, ", "))
		}
	}
	slices.SortFunc(looks, func(a, b Look) int {
		return strings.Compare(a.Statement+" "+a.Plan, b.Statement+" "+b.Plan)
	})
	if err := write(os.Getenv(outEnv), looks); err != nil {
		e.tb.Fatal(err)
	}
}

// Statements lists what was looked at.
func (e *Explainer) Statements() map[string]bool {
	names := map[string]bool{}
	for _, l := range e.looks {
		names[l.Statement] = true
	}
	return names
}

func write(path string, looks []Look) error {
	if path == "" {
		return nil
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("plans: %w", err)
	}
	enc := json.NewEncoder(f)
	for _, l := range looks {
		if err = enc.Encode(l); err != nil {
			break
		}
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("plans: write %s: %w", path, err)
	}
	return nil
}
