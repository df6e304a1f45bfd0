package wal

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParseRow(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		line string
		want row
	}{
		"insert": {
			`table public.t: INSERT: id[integer]:1 name[text]:'it''s' gone[text]:null ok[boolean]:true price[numeric]:-1.50`,
			row{table: "public.t", op: "INSERT", new: map[string]string{"id": "1", "name": "it's", "ok": "true", "price": "-1.50"}},
		},
		"the word null in quotes is no null": {
			`table public.t: INSERT: a[text]:'null' b[text]:''`,
			row{table: "public.t", op: "INSERT", new: map[string]string{"a": "null", "b": ""}},
		},
		"update without the old row": {
			`table public.t: UPDATE: id[integer]:1 name[text]:'b'`,
			row{table: "public.t", op: "UPDATE", new: map[string]string{"id": "1", "name": "b"}},
		},
		"update with the old row": {
			`table public.t: UPDATE: old-key: id[integer]:1 name[text]:'a' new-tuple: id[integer]:1 name[text]:'b'`,
			row{table: "public.t", op: "UPDATE", old: map[string]string{"id": "1", "name": "a"}, new: map[string]string{"id": "1", "name": "b"}},
		},
		"text that looks like syntax": {
			`table public.t: UPDATE: old-key: a[text]:' new-tuple: id[integer]:9' new-tuple: a[text]:'x'' new-tuple: y[text]:''z'`,
			row{
				table: "public.t", op: "UPDATE",
				old: map[string]string{"a": " new-tuple: id[integer]:9"}, new: map[string]string{"a": "x' new-tuple: y[text]:'z"},
			},
		},
		"newlines": {
			"table public.t: INSERT: a[text]:'line 1\nCOMMIT 12'",
			row{table: "public.t", op: "INSERT", new: map[string]string{"a": "line 1\nCOMMIT 12"}},
		},
		"arrays, timestamps, bits": {
			`table public.t: INSERT: a[text[]]:'{a,"b c"}' at[timestamp with time zone]:'2026-03-01 12:00:00.5+00' b[bit]:B'101' f[double precision]:NaN`,
			row{table: "public.t", op: "INSERT", new: map[string]string{
				"a": `{a,"b c"}`, "at": "2026-03-01 12:00:00.5+00", "b": "101", "f": "NaN",
			}},
		},
		"quoted names": {
			`table "My Schema"."a.b: INSERT:": INSERT: "old-key: x[""y"[public."my ]type"]:'v' "new-tuple:"[text]:'w'`,
			row{table: `"My Schema"."a.b: INSERT:"`, op: "INSERT", new: map[string]string{`old-key: x["y`: "v", "new-tuple:": "w"}},
		},
		"delete": {
			`table public.t: DELETE: id[integer]:1`,
			row{table: "public.t", op: "DELETE", old: map[string]string{"id": "1"}},
		},
		"delete without a replica identity": {
			`table public.t: DELETE: (no-tuple-data)`, row{table: "public.t", op: "DELETE"},
		},
		"truncate": {`table public.t: TRUNCATE: (no-flags)`, row{table: "public.t", op: "TRUNCATE"}},
		"truncate of two": {
			`table public.t, public.u: TRUNCATE: restart_seqs cascade`, row{table: "public.t", op: "TRUNCATE"},
		},
		"large value left as it was": {
			`table public.t: UPDATE: old-key: id[integer]:1 big[text]:'…' new-tuple: id[integer]:2 big[text]:unchanged-toast-datum`,
			row{table: "public.t", op: "UPDATE", old: map[string]string{"id": "1", "big": "…"}, new: map[string]string{"id": "2", "big": "…"}},
		},
		"large value left as it was, never logged": {
			`table public.t: UPDATE: id[integer]:2 big[text]:unchanged-toast-datum`,
			row{table: "public.t", op: "UPDATE", new: map[string]string{"id": "2", "big": unchanged}},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := parseRow(c.line, nil)
			require.NoError(t, err)
			require.Equal(t, c.want, got)
		})
	}
}

func TestDroppedColumnsKeepTheirIdentity(t *testing.T) {
	t.Parallel()
	drop := func(column string) bool { return column == "mail" }
	parse := func(value string) string {
		r, err := parseRow(`table public.t: INSERT: id[integer]:1 mail[bytea]:`+value, drop)
		require.NoError(t, err)
		require.Equal(t, "1", r.new["id"])
		return r.new["mail"]
	}
	hello := parse(`'\x68656c6c6f'`)
	require.Equal(t, "(5 bytes, sha256 2cf24dba5fb0a30e)", hello)
	require.NotEqual(t, hello, parse(`'\x68656c6c70'`))
	require.Equal(t, hello, parse(`'hello'`))
	require.Empty(t, parse(`null`))
}

func TestParseRefusesWhatPostgresDoesNotPrint(t *testing.T) {
	t.Parallel()
	for _, line := range []string{
		"", "table", "table public", "table public.t", "table public.t:", "table public.t: MERGE: a[text]:'b'", "table public.t: INSERT",
		"table public.t: INSERT: a", "table public.t: INSERT: a[text", "table public.t: INSERT: a[text]", "table public.t: INSERT: a[text]:",
		"table public.t: INSERT: a[text]:'open", "table public.t: UPDATE: old-key: a[text]:'b'", `table public."t: INSERT: a[text]:'b'`,
		"message: transactional: 1 prefix: x, sz: 1 content:y",
	} {
		_, err := parseRow(line, nil)
		require.ErrorIs(t, err, errSyntax, line)
	}
	_, err := parseBegin("BEGIN")
	require.ErrorIs(t, err, errSyntax)
	_, err = parseCommit("COMMIT 12")
	require.ErrorIs(t, err, errSyntax)
}

func TestParseFrame(t *testing.T) {
	t.Parallel()
	xid, err := parseBegin("BEGIN 4294967295")
	require.NoError(t, err)
	require.EqualValues(t, 4294967295, xid)
	at, err := parseCommit("COMMIT 7 (at 2026-03-01 12:00:00.000123+00)")
	require.NoError(t, err)
	require.Equal(t, time.Date(2026, 3, 1, 12, 0, 0, 123_000, time.UTC), at)
	require.Equal(t, "2/A", lsn(2<<32+10).String())
}

// printRow is the inverse of parseRow.
func printRow(r row) string {
	columns := func(values map[string]string) string {
		var b strings.Builder
		for _, name := range slices.Sorted(maps.Keys(values)) {
			fmt.Fprintf(&b, ` "%s"[text]:'%s'`, strings.ReplaceAll(name, `"`, `""`), strings.ReplaceAll(values[name], "'", "''"))
		}
		return b.String()
	}
	switch {
	case r.op == "UPDATE" && r.old != nil:
		return "table " + r.table + ": UPDATE: old-key:" + columns(r.old) + " new-tuple:" + columns(r.new)
	case r.op == "DELETE":
		return "table " + r.table + ": DELETE:" + columns(r.old)
	default:
		return "table " + r.table + ": " + r.op + ":" + columns(r.new)
	}
}

// FuzzParseRow feeds the parser with any line: it must not panic, and what it
// accepts it must read the same after it was printed anew.
func FuzzParseRow(f *testing.F) {
	f.Add(`table public.t: INSERT: id[integer]:1 name[text]:'it''s' gone[text]:null`)
	f.Add(`table public.t: UPDATE: old-key: id[integer]:1 a[text[]]:'{a}' new-tuple: id[integer]:1 a[text[]]:null`)
	f.Add(`table "A".""""": DELETE: (no-tuple-data)`)
	f.Add(`table public.t, public.u: TRUNCATE: (no-flags)`)
	f.Fuzz(func(t *testing.T, line string) {
		r, err := parseRow(line, nil)
		if err != nil || r.op == "TRUNCATE" || r.old == nil && r.new == nil {
			return
		}
		again, err := parseRow(printRow(r), nil)
		if err != nil {
			t.Fatalf("%q was read as %v, printed as %q, and refused: %v", line, r, printRow(r), err)
		}
		require.Equal(t, r, again)
	})
}

// FuzzValues prints any text as a value and reads it back.
func FuzzValues(f *testing.F) {
	f.Add("status", "it's", "new-tuple:", "")
	f.Fuzz(func(t *testing.T, column, before, other, after string) {
		want := row{table: "public.t", op: "UPDATE", old: map[string]string{column: before}, new: map[string]string{column: after, other: before}}
		if column == "" || other == "" || after == unchanged || before == unchanged {
			return
		}
		got, err := parseRow(printRow(want), nil)
		if err != nil {
			t.Fatal(err)
		}
		require.Equal(t, want, got)
	})
}
