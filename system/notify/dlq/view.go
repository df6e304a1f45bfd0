package dlq

import (
	"time"

	"mailproof/system/delivery"
	"mailproof/system/notify/logging"
)

// Mail is a row as people see it: recipients are masked, also in what a server
// said, and no body is shown (M6-18).
type Mail struct {
	ID        string     `json:"id"`
	DedupeKey string     `json:"dedupe_key"`
	EventID   string     `json:"event_id,omitempty"`
	BookingID string     `json:"booking_id,omitempty"`
	Lane      string     `json:"lane"`
	Status    string     `json:"status"`
	Recipient string     `json:"recipient"`
	Attempts  int        `json:"attempts"`
	Limit     int        `json:"attempt_limit"`
	Error     string     `json:"error,omitempty"` // the last one
	Stamped   bool       `json:"dead_letter_confirmed"`
	Created   time.Time  `json:"created_at"`
	Changed   time.Time  `json:"changed_at"`
	SentAt    *time.Time `json:"sent_at,omitempty"`
}

// View is the row for people.
func View(r delivery.Row) Mail {
	m := Mail{
		ID: r.ID.String(), DedupeKey: r.DedupeKey, BookingID: r.BookingID, Lane: r.Type.Lane(), Status: string(r.Status),
		Recipient: logging.Mask(r.Recipient), Attempts: r.Attempts, Limit: r.AttemptLimit,
		Stamped: r.DLQPublishedAt != nil, Created: r.CreatedAt, Changed: r.ChangedAt, SentAt: r.SentAt,
	}
	if r.LastError != nil {
		m.Error = logging.Mask(*r.LastError)
	}
	if r.EventID != nil {
		m.EventID = *r.EventID
	}
	return m
}

// Views are rows for people.
func Views(rows []delivery.Row) []Mail {
	out := make([]Mail, len(rows))
	for i, r := range rows {
		out[i] = View(r)
	}
	return out
}

// Case is one mail with what people did about it.
type Case struct {
	Mail
	Discarded bool    `json:"discarded"`
	Audit     []Entry `json:"audit"`
}

// View is the dossier for people.
func (d Dossier) View() Case {
	return Case{Mail: View(d.Row), Discarded: d.Discarded, Audit: d.Audit}
}
