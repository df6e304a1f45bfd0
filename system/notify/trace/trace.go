// Package trace tells the story of one mail, or of all mails of a booking, to
// somebody who has a customer on the phone: what happened when, and what that
// means (CASE-1: two confirmations, CASE-6: a cancelled booking that got its
// mail).
//
// It only reads. What it says of a cause follows from the rows alone, and where
// rows cannot tell (which process made which try) it says where to look. It must
// not decide anything about mails.
package trace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"mailproof/system/delivery"
	"mailproof/system/notify/alerts"
	"mailproof/system/notify/dlq"
	"mailproof/system/notify/logging"
	"mailproof/system/notify/reconciler"
	"mailproof/system/notify/webhook"
)

// Store is what is read of the rows.
type Store interface {
	ByKey(ctx context.Context, key string) (delivery.Row, error)
	ByBooking(ctx context.Context, booking string, limit int) ([]delivery.Row, error)
	CancelOf(ctx context.Context, booking string) (*delivery.BookingCancel, error)
	AlertsOf(ctx context.Context, kinds []string, key string) ([]delivery.RaisedAlert, error)
	ToldOf(ctx context.Context, r delivery.Row) ([]delivery.ToldEvent, error)
}

// Audit is what people did about a mail.
type Audit interface {
	Of(ctx context.Context, id uuid.UUID) ([]dlq.Entry, error)
}

// Reports is what the provider told of a mail after it had taken it.
type Reports interface {
	Of(ctx context.Context, id uuid.UUID) ([]webhook.Report, error)
}

// Tracer reads.
type Tracer struct {
	Store   Store
	Audit   Audit
	Reports Reports
	// Log of the provider; nil where there is none to ask.
	Log reconciler.Log
}

// most mails of one booking that are shown.
const most = 50

// Story of a key or a booking.
type Story struct {
	Asked     string                  `json:"asked"`
	BookingID string                  `json:"booking_id,omitempty"`
	Cancel    *delivery.BookingCancel `json:"cancel,omitempty"` // the newest that was heard of
	Mails     []Mail                  `json:"mails"`
	Timeline  []Moment                `json:"timeline"`
	Findings  []string                `json:"findings"`
}

// Mail is a row with all that belongs to it.
type Mail struct {
	dlq.Mail
	Type         string                 `json:"type"`
	Generation   int                    `json:"generation"`
	Unsettled    int                    `json:"unsettled"` // tries without a known refusal, the accepted one included
	CancelAsked  bool                   `json:"cancel_requested"`
	FirstClaimed *time.Time             `json:"first_claimed_at,omitempty"`
	ProviderID   string                 `json:"provider_id,omitempty"`
	Alerts       []delivery.RaisedAlert `json:"alerts,omitempty"`
	Events       []delivery.ToldEvent   `json:"mail_events,omitempty"`
	Audit        []dlq.Entry            `json:"audit,omitempty"`
	Reports      []webhook.Report       `json:"provider_reports,omitempty"`
	Provider     []ProviderLine         `json:"provider_log,omitempty"`
	ProviderNote string                 `json:"provider_note,omitempty"`
}

// ProviderLine is what the provider's log has about the key.
type ProviderLine struct {
	Event      string `json:"event"`
	Session    string `json:"session"` // its session and time, as the log names them
	ProviderID string `json:"provider_id,omitempty"`
}

// Moment of a story.
type Moment struct {
	At   time.Time `json:"at"`
	Key  string    `json:"dedupe_key,omitempty"`
	What string    `json:"what"`
}

// Of tells the story of a dedupe key with the other mails of its booking, or of
// a booking when there is no such key. Nothing found is no error: the story says
// so.
func (t Tracer) Of(ctx context.Context, asked string) (Story, error) {
	s := Story{Asked: asked, BookingID: asked}
	row, err := t.Store.ByKey(ctx, asked)
	switch {
	case err == nil:
		s.BookingID = row.BookingID
	case !errors.Is(err, delivery.ErrNoRow):
		return s, err
	}
	rows, err := t.rows(ctx, row, s.BookingID)
	if err != nil {
		return s, err
	}
	if s.BookingID != "" {
		if s.Cancel, err = t.Store.CancelOf(ctx, s.BookingID); err != nil {
			return s, err
		}
	}
	for _, r := range rows {
		m, err := t.mail(ctx, r)
		if err != nil {
			return s, err
		}
		s.Mails = append(s.Mails, m)
	}
	s.Timeline = timeline(s)
	s.Findings = explain(s)
	return s, nil
}

// rows are those of the booking, or the asked one alone when it has none.
func (t Tracer) rows(ctx context.Context, asked delivery.Row, booking string) ([]delivery.Row, error) {
	if booking == "" {
		return []delivery.Row{asked}, nil
	}
	return t.Store.ByBooking(ctx, booking, most)
}

func (t Tracer) mail(ctx context.Context, r delivery.Row) (Mail, error) {
	m := Mail{
		Mail: dlq.View(r), Type: string(r.Type), Generation: r.Generation, Unsettled: r.Unsettled, CancelAsked: r.CancelAsked,
		FirstClaimed: r.FirstClaimedAt,
	}
	if r.ProviderMsgID != nil {
		m.ProviderID = *r.ProviderMsgID
	}
	var err error
	if m.Alerts, err = t.Store.AlertsOf(ctx, alerts.Kinds(), r.DedupeKey); err != nil {
		return m, err
	}
	for i := range m.Alerts {
		m.Alerts[i].Details = logging.Mask(m.Alerts[i].Details)
	}
	if m.Events, err = t.Store.ToldOf(ctx, r); err != nil {
		return m, err
	}
	if m.Audit, err = t.Audit.Of(ctx, r.ID); err != nil {
		return m, err
	}
	if m.Reports, err = t.Reports.Of(ctx, r.ID); err != nil {
		return m, err
	}
	for i := range m.Reports {
		m.Reports[i].Reason = logging.Mask(m.Reports[i].Reason)
	}
	m.Provider, m.ProviderNote = t.provider(ctx, r)
	return m, nil
}

// provider asks the provider's log. That it does not answer is part of the
// story, not the end of it.
func (t Tracer) provider(ctx context.Context, r delivery.Row) ([]ProviderLine, string) {
	if t.Log == nil {
		return nil, "no log to ask: NOTIFYD_PROVIDER_LOG_URL is not set"
	}
	page, err := t.Log.Lookup(ctx, r)
	if err != nil {
		return nil, "the log did not answer: " + err.Error()
	}
	var out []ProviderLine
	for _, l := range page.Lines {
		out = append(out, ProviderLine{Event: string(l.Event), Session: l.ID, ProviderID: l.ProviderID})
	}
	if len(out) == 0 {
		return nil, "the log has nothing about the key"
	}
	return out, ""
}

// timeline puts every time that is known in order.
func timeline(s Story) []Moment {
	var out []Moment
	add := func(at *time.Time, key, format string, args ...any) {
		if at != nil && !at.IsZero() {
			out = append(out, Moment{At: at.UTC(), Key: key, What: fmt.Sprintf(format, args...)})
		}
	}
	if s.Cancel != nil {
		add(&s.Cancel.CancelledAt, "", "cancel of generation %d heard here", s.Cancel.Generation)
	}
	for _, m := range s.Mails {
		if at, ok := madeAt(m.EventID); ok {
			add(&at, m.DedupeKey, "event %s written by the booking service (its own clock)", m.EventID)
		}
		if m.EventID == "" {
			add(&m.Created, m.DedupeKey, "tombstone: the cancel came before its event")
		} else {
			add(&m.Created, m.DedupeKey, "row made")
		}
		add(m.FirstClaimed, m.DedupeKey, "first try claimed")
		if m.SentAt != nil {
			add(m.SentAt, m.DedupeKey, "SENT at try %d, provider id %q", m.Attempts, m.ProviderID)
		} else {
			add(&m.Changed, m.DedupeKey, "became %s, %d of %d tries, last error: %s", m.Status, m.Attempts, m.Limit, orNone(m.Error))
		}
		for _, a := range m.Alerts {
			add(&a.CreatedAt, m.DedupeKey, "alert %s: %s", a.Kind, a.Details)
		}
		for _, r := range m.Reports {
			add(&r.ToldAt, m.DedupeKey, "the provider told that it was %s: %s", r.Event, orNone(r.Reason))
		}
		for _, e := range m.Audit {
			add(&e.At, m.DedupeKey, "%s by %s: %s", e.Action, e.Actor, orNone(e.Reason))
		}
		for _, e := range m.Events {
			add(&e.CreatedAt, m.DedupeKey, "%s written, event %s", e.Type, e.EventID)
			add(e.PublishedAt, m.DedupeKey, "%s published", e.Type)
		}
	}
	slices.SortStableFunc(out, func(a, b Moment) int { return a.At.Compare(b.At) })
	return out
}

// madeAt reads the time in a UUIDv7.
func madeAt(event string) (time.Time, bool) {
	id, err := uuid.Parse(event)
	if err != nil || id.Version() != 7 {
		return time.Time{}, false
	}
	var ms int64
	for _, b := range id[:6] {
		ms = ms<<8 | int64(b)
	}
	return time.UnixMilli(ms), true
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}
