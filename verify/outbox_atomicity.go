package verify

import (
	"slices"

	"mailproof/history"
)

var outboxAtomicity = rule{
	name:      "outbox-atomicity",
	statement: "A booking is confirmed if and only if the same transaction left an outbox row; what failed left neither.",
	needs:     needsOutbox,
	check: func(e *Evidence, r *report) {
		checkOutboxOfOps(e, r)
		checkOutboxTransactions(e, r)
		checkOrdersFollowed(e, r)
	},
}

// checkOutboxOfOps compares what clients were told with the rows that are left.
func checkOutboxOfOps(e *Evidence, r *report) {
	e.mails(func(m *Mail) {
		asked := m.Asked()
		if asked == "" || m.Campaign != "" {
			return // a campaign goes to the mail service itself
		}
		r.looked(1)
		switch {
		case asked == history.OpOK && len(m.Outbox) == 0:
			r.breach(m.Key, "its confirmation was acknowledged, and the outbox holds no row of it")
		case asked == history.OpFail && len(m.Outbox) > 0 && !m.MayBeCancelled():
			r.breach(m.Key, "its confirmation definitely failed, and the outbox holds a row of it")
		}
	})
}

// checkOrdersFollowed wants the orders' log, where there is a log at all: without
// it half of this invariant is judged and all of it reported as kept.
func checkOrdersFollowed(e *Evidence, r *report) {
	if e.Columns.Orders.Table == "" || !e.hasWAL() || !slices.ContainsFunc(e.Ops, func(o history.Op) bool {
		return o.Name == "confirm" && o.Outcome == history.OpOK
	}) {
		return
	}
	if !slices.ContainsFunc(e.Changes, func(c history.Change) bool { return c.Table == e.Columns.Orders.Table }) {
		r.find(Invalid, "", "confirmations were acknowledged, and no changes of %s were recorded", e.Columns.Orders.Table)
	}
}

// checkOutboxTransactions looks, in the log of the orders' database, for a
// confirmation whose transaction wrote no outbox row.
func checkOutboxTransactions(e *Evidence, r *report) {
	type transaction struct {
		db  string
		xid uint64
	}
	c := e.Columns
	wrote := map[transaction]bool{}
	for i := range e.Changes {
		ch := &e.Changes[i]
		if ch.Table == c.Outbox && ch.Op == "INSERT" {
			wrote[transaction{ch.Database, ch.XID}] = true
		}
	}
	status := map[string]string{} // order → status after the latest change
	for i := range e.Changes {
		ch := &e.Changes[i]
		if ch.Table != c.Orders.Table || ch.New == nil {
			continue
		}
		id, now := ch.Database+"/"+ch.New[c.Orders.ID], ch.New[c.Orders.Status]
		became := now == c.Orders.Confirmed && status[id] != now
		status[id] = now
		if !became {
			continue
		}
		r.looked(1)
		if !wrote[transaction{ch.Database, ch.XID}] {
			r.breach("", "booking %s became %s in transaction %d, which wrote no outbox row", ch.New[c.Orders.ID], now, ch.XID)
		}
	}
}
