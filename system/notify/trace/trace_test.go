package trace

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/system/delivery"
	"mailproof/system/notify/dlq"
	"mailproof/system/notify/webhook"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func at(minutes int) *time.Time {
	t := noon.Add(time.Duration(minutes) * time.Minute)
	return &t
}

// sent is a mail of generation 1 whose row was made at noon, claimed a minute
// later, and accepted at the second minute.
func sent(change func(*Mail)) Mail {
	m := Mail{
		Mail: dlq.Mail{
			ID: "1", DedupeKey: "ticket:b", EventID: "019580b2-1c00-7000-8000-000000000000", BookingID: "b", Status: "SENT", Attempts: 1, Limit: 4,
			Created: *at(0), Changed: *at(2), SentAt: at(2),
		},
		Type: "TICKET_CONFIRMATION", Generation: 1, Unsettled: 1, FirstClaimed: at(1), ProviderID: "p",
	}
	if change != nil {
		change(&m)
	}
	return m
}

func TestFindings(t *testing.T) {
	t.Parallel()
	cancelAt := func(minute int) *delivery.BookingCancel {
		return &delivery.BookingCancel{Generation: 1, CancelledAt: *at(minute)}
	}
	for name, c := range map[string]struct {
		story Story
		want  []string // each stands in some finding
		not   []string // stands in none
	}{
		"nothing known":           {Story{Asked: "ticket:b"}, []string{"no mail of this key", "bookingd outbox find ticket:b"}, nil},
		"one try":                 {Story{Mails: []Mail{sent(nil)}}, []string{"one row", "one try, accepted"}, []string{"DEFECT", "without a known outcome"}},
		"refused, then sent":      {Story{Mails: []Mail{sent(func(m *Mail) { m.Attempts = 3 })}}, []string{"all but the last refused for certain"}, nil},
		"open try, then sent":     {Story{Mails: []Mail{sent(func(m *Mail) { m.Attempts, m.Unsettled = 2, 2 })}}, []string{"2 tries, of which 1 ended without a known outcome"}, nil},
		"provider has two copies": {Story{Mails: []Mail{sent(func(m *Mail) { m.Provider = []ProviderLine{{Event: "stored"}, {Event: "stored"}} })}}, []string{"2 copies"}, nil},
		"provider has one copy":   {Story{Mails: []Mail{sent(func(m *Mail) { m.Provider = []ProviderLine{{Event: "stored"}, {Event: "closed"}} })}}, []string{"one copy"}, nil},
		"came back":               {Story{Mails: []Mail{sent(func(m *Mail) { m.Reports = []webhook.Report{{Event: "suppressed", Reason: "on the list"}} })}}, []string{"suppressed by the provider's word (on the list)", "does not have it"}, nil},
		"called spam":             {Story{Mails: []Mail{sent(func(m *Mail) { m.Reports = []webhook.Report{{Event: "complained"}} })}}, []string{"called it spam"}, []string{"does not have it"}},
		"sent again": {Story{Mails: []Mail{
			sent(func(m *Mail) { m.Audit = []dlq.Entry{{Action: "send-again", Actor: "anna", Reason: "deleted it"}} }),
			sent(func(m *Mail) { m.ID, m.DedupeKey = "2", "ticket:b:resend:1" }),
		}}, []string{"ticket:b:resend:1 was sent again on purpose by anna: deleted it"}, []string{"two events", "one row"}},
		"reopened": {Story{Mails: []Mail{
			sent(nil), sent(func(m *Mail) { m.ID, m.DedupeKey, m.Generation = "2", "ticket:b:v2", 2 }),
		}}, []string{"2 rows of 2 generations"}, []string{"two events"}},
		"two keys of one intent": {Story{Mails: []Mail{
			sent(nil), sent(func(m *Mail) { m.ID, m.DedupeKey = "2", "ticket:b:1772366400" }),
		}}, []string{"two events asked for one mail under different keys"}, nil},
		"cancelled too late":         {Story{Cancel: cancelAt(3), Mails: []Mail{sent(nil)}}, []string{"SENT 1m0s before the cancel"}, []string{"DEFECT"}},
		"cancelled while sending":    {Story{Cancel: cancelAt(1), Mails: []Mail{sent(func(m *Mail) { m.FirstClaimed, m.CancelAsked = at(0), true })}}, []string{"accepted 1m0s after it"}, []string{"DEFECT"}},
		"no tombstone":               {Story{Cancel: cancelAt(-1), Mails: []Mail{sent(nil)}}, []string{"DEFECT: its row was made after the cancel", "TRAP-C2-1"}, nil},
		"claimed after the cancel":   {Story{Cancel: &delivery.BookingCancel{Generation: 1, CancelledAt: noon.Add(30 * time.Second)}, Mails: []Mail{sent(nil)}}, []string{"TRAP-C2-7"}, []string{"TRAP-C2-1"}},
		"cancelled in time":          {Story{Cancel: cancelAt(1), Mails: []Mail{sent(func(m *Mail) { m.Status, m.SentAt = "CANCELLED", nil })}}, []string{"cancelled in time"}, []string{"DEFECT"}},
		"the older cancel":           {Story{Cancel: cancelAt(1), Mails: []Mail{sent(func(m *Mail) { m.DedupeKey, m.Generation = "ticket:b:v2", 2 })}}, nil, []string{"cancel", "DEFECT"}},
		"waiting, no cancel heard":   {Story{BookingID: "b", Mails: []Mail{sent(func(m *Mail) { m.Status, m.SentAt = "PENDING", nil })}}, []string{"no cancel of it was heard here", "bookingd re-emit b"}, nil},
		"cancelled, outcome unknown": {Story{Cancel: cancelAt(1), Mails: []Mail{sent(func(m *Mail) { m.Status, m.SentAt = "UNKNOWN", nil })}}, []string{"reconcile-unknown"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			found := explain(c.story)
			all := ""
			for _, f := range found {
				all += f + "\n"
			}
			for _, w := range c.want {
				require.Contains(t, all, w)
			}
			for _, w := range c.not {
				require.NotContains(t, all, w)
			}
		})
	}
}

// The timeline is in order and begins with the time that the event's id carries.
func TestTimeline(t *testing.T) {
	t.Parallel()
	published := at(4)
	m := sent(func(m *Mail) {
		m.Alerts = []delivery.RaisedAlert{{Kind: "mail-unknown", Details: "no reply", CreatedAt: *at(1)}}
		m.Events = []delivery.ToldEvent{{EventID: "e", Type: "EmailSent", CreatedAt: *at(2), PublishedAt: published}}
		m.Audit = []dlq.Entry{{Action: "replay", Actor: "anna", At: *at(3)}}
		m.Reports = []webhook.Report{{Event: "bounced", Reason: "no such mailbox", ToldAt: *at(4)}}
	})
	moments := timeline(Story{Mails: []Mail{m}, Cancel: &delivery.BookingCancel{Generation: 1, CancelledAt: *at(5)}})
	var last time.Time
	for _, x := range moments {
		require.False(t, x.At.Before(last), x.What)
		last = x.At
	}
	require.Len(t, moments, 10)
	require.Contains(t, moments[0].What, "written by the booking service")
	require.Contains(t, moments[9].What, "cancel of generation 1")
	made, ok := madeAt("019580b2-1c00-7000-8000-000000000000")
	require.True(t, ok)
	require.Equal(t, int64(0x019580b21c00), made.UnixMilli())
	_, ok = madeAt("resend:1")
	require.False(t, ok)
}
