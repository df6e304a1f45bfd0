package wal

import (
	"encoding/json"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"mailproof/history"
)

// life is what happened to rows of two tables, each change whole.
func drawChanges(t *rapid.T) []history.Change {
	rows := map[string]map[string]string{} // table and id → columns
	column := rapid.SampledFrom([]string{"status", "attempts", "token", "payload"})
	value := rapid.SampledFrom([]string{"", "1", "2", "it's"})
	var all []history.Change
	for i := range rapid.IntRange(0, 60).Draw(t, "changes") {
		table := rapid.SampledFrom([]string{"public.mails", "public.orders"}).Draw(t, "table")
		id := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "row")
		at := table + "/" + id
		c := history.Change{
			Database: "shop", Table: table, XID: uint64(i), LSN: lsn(i + 1).String(), Order: int64(i + 1),
			CommitAt: time.Unix(int64(1000+i), 0).UTC(), Old: maps.Clone(rows[at]), Row: id,
		}
		switch before := rows[at]; {
		case before == nil && rapid.Bool().Draw(t, "older than the log"):
			before = map[string]string{"id": id, "status": "0"}
			c.Old, rows[at], c.Op = maps.Clone(before), before, "UPDATE"
		case before == nil:
			rows[at], c.Op = map[string]string{"id": id}, "INSERT"
		case rapid.IntRange(0, 5).Draw(t, "delete") == 0:
			delete(rows, at)
			c.Op = "DELETE"
			all = append(all, c)
			continue
		default:
			c.Op = "UPDATE"
		}
		for range rapid.IntRange(0, 3).Draw(t, "columns") {
			col := column.Draw(t, "column")
			if v := value.Draw(t, "value"); v != "" {
				rows[at][col] = v
			} else {
				delete(rows[at], col)
			}
		}
		c.New = maps.Clone(rows[at])
		all = append(all, c)
	}
	return all
}

// What was left out when it was written is there again when it is read.
func TestShortenedChangesAreReadWhole(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := drawChanges(t)
		var records []history.Record
		c := Collector{cfg: Config{Database: "shop", Identity: "id", Sink: func(ch history.Change) error {
			line, err := json.Marshal(history.Record{T: ch.Order, Kind: history.KindChange, Change: &ch})
			require.NoError(t, err)
			rec, err := history.Decode(line)
			records = append(records, rec)
			return err
		}}, whole: map[rowName]struct{}{}}
		for i, ch := range want {
			ch.Old, ch.New, ch.Row = maps.Clone(ch.Old), maps.Clone(ch.New), ""
			c.tx.changes = []history.Change{ch}
			require.NoError(t, c.commit(lsn(i+1), fmt.Sprintf("COMMIT %d (at %s)", i, ch.CommitAt.Format("2006-01-02 15:04:05.999999-07"))))
		}
		h := history.FromRecords(records)
		require.Empty(t, h.Problems)
		require.Len(t, h.Changes, len(want))
		for i := range want {
			got := h.Changes[i]
			got.At = 0
			if want[i].Op == "INSERT" {
				got.Old = nil
			}
			require.Equal(t, want[i], got, "change %d", i)
		}
	})
}

func TestLaterChangesHoldWhatTheyChanged(t *testing.T) {
	t.Parallel()
	var sunk []history.Change
	c := Collector{cfg: Config{Identity: "id", Sink: func(ch history.Change) error { sunk = append(sunk, ch); return nil }}, whole: map[rowName]struct{}{}}
	row := map[string]string{"id": "a", "status": "PENDING", "payload": "long", "due": "now"}
	after := map[string]string{"id": "a", "status": "SENDING", "payload": "long", "token": "1"}
	c.tx.changes = []history.Change{
		{Table: "public.mails", Op: "INSERT", New: maps.Clone(row)},
		{Table: "public.mails", Op: "UPDATE", Old: row, New: after},
		{Table: "public.flags", Op: "INSERT", New: map[string]string{"campaign": "spring"}},
	}
	require.NoError(t, c.commit(1, "COMMIT 1 (at 2026-03-01 12:00:00+00)"))
	require.False(t, sunk[0].Delta)
	require.True(t, sunk[1].Delta)
	require.Equal(t, "a", sunk[1].Row)
	require.Equal(t, map[string]string{"status": "PENDING", "due": "now"}, sunk[1].Old)
	require.Equal(t, map[string]string{"status": "SENDING", "token": "1"}, sunk[1].New)
	require.Empty(t, sunk[2].Row, "a table without that column is written whole")
}
