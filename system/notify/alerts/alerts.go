// Package alerts tells people: a row in the table alerts, a line on level ERROR
// in the log, and a webhook when there is one (M6-04).
//
// An alert is identified by kind, subject and occurrence. It guarantees that
// raising the same one again, after a crash or by the sweeper, changes nothing:
// the row is the record of it, and only the call that makes the row logs and
// posts. [Raiser.Raise] returns nil only when the row is committed. The webhook
// is best effort: what it misses is in the table.
//
// It must not import the parts that raise alerts.
package alerts

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"mailproof/system/notify/logging"
)

// Kind of an alert.
type Kind string

// The kinds.
const (
	MailDead           Kind = "mail-dead"           // tries used up or a permanent refusal
	MailUnknown        Kind = "mail-unknown"        // sent or not: only the server knows
	MailExpired        Kind = "mail-expired"        // too late to be worth sending
	EventParked        Kind = "event-parked"        // an event nobody here can read
	MessageUndecodable Kind = "message-undecodable" // a message nobody here can read
	EventDead          Kind = "event-dead"          // a mail event that Kafka refuses
	LaneRefused        Kind = "lane-refused"        // the mail server refuses us
)

// Kinds lists them.
func Kinds() []string {
	var out []string
	for _, k := range []Kind{MailDead, MailUnknown, MailExpired, EventParked, MessageUndecodable, EventDead, LaneRefused} {
		out = append(out, string(k))
	}
	return out
}

// subject is the log's name for what an alert of this kind is about.
func (k Kind) subject() string {
	switch k {
	case MailDead, MailUnknown, MailExpired:
		return logging.DedupeKey
	default:
		return "subject"
	}
}

// Alert is one thing that a person must see.
type Alert struct {
	Kind Kind
	// Subject is a dedupe key, "topic/partition/offset", or a lane.
	Subject string
	// Occurrence tells one incident of a subject from the next; for a mail the
	// version of its row.
	Occurrence string
	EventID    string
	Attempts   int
	Detail     string
}

// Table keeps alerts; the same kind, key and incident make one row. It reports
// whether the row is new.
type Table interface {
	RaiseIncident(ctx context.Context, kind, key, incident, details string) (bool, error)
}

// Counter counts alerts.
type Counter interface{ Alert(kind string) }

// Raiser raises alerts.
type Raiser struct {
	table Table
	log   *slog.Logger
	count Counter
	hook  *webhook
}

// New makes a raiser; url "" means no webhook. Run must run for the webhook to
// be called.
func New(table Table, log *slog.Logger, count Counter, url string) *Raiser {
	r := &Raiser{table: table, log: log, count: count}
	if url != "" {
		r.hook = &webhook{
			url: url, log: log, queue: make(chan Alert, 256),
			client: &http.Client{Timeout: 5 * time.Second},
		}
	}
	return r
}

// Run posts to the webhook until ctx ends.
func (r *Raiser) Run(ctx context.Context) error {
	if r.hook == nil {
		<-ctx.Done()
		return nil
	}
	r.hook.run(ctx)
	return nil
}

// Raise records alerts. After an error it is not known which rows are there:
// raise all of them again.
func (r *Raiser) Raise(ctx context.Context, alerts ...Alert) error {
	_, err := r.RaiseNew(ctx, alerts...)
	return err
}

// RaiseNew is Raise, and says how many of them had not been raised before.
func (r *Raiser) RaiseNew(ctx context.Context, alerts ...Alert) (int, error) {
	fresh := 0
	for _, a := range alerts {
		a.Detail = logging.Plain(a.Detail, 4000)
		isNew, err := r.table.RaiseIncident(ctx, string(a.Kind), a.Subject, a.Occurrence, a.Detail)
		if err != nil {
			return fresh, err
		}
		if isNew {
			fresh++
			r.tell(a)
		}
	}
	return fresh, nil
}

// RaiseIn records alerts in a table inside a transaction of the caller's. tell,
// called after the commit, tells of those that are new. A crash between the two
// leaves them in the table only.
func (r *Raiser) RaiseIn(ctx context.Context, table Table, alerts ...Alert) (tell func(), err error) {
	var fresh []Alert
	for _, a := range inOrder(alerts) {
		a.Detail = logging.Plain(a.Detail, 4000)
		isNew, err := table.RaiseIncident(ctx, string(a.Kind), a.Subject, a.Occurrence, a.Detail)
		if err != nil {
			return nil, err
		}
		if isNew {
			fresh = append(fresh, a)
		}
	}
	return func() {
		for _, a := range fresh {
			r.tell(a)
		}
	}, nil
}

// inOrder sorts alerts and leaves repetitions out: transactions that raise the
// same ones must not wait for each other crosswise.
func inOrder(alerts []Alert) []Alert {
	byRow := func(a, b Alert) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Subject, b.Subject), cmp.Compare(a.Occurrence, b.Occurrence))
	}
	sorted := slices.SortedStableFunc(slices.Values(alerts), byRow)
	return slices.CompactFunc(sorted, func(a, b Alert) bool { return byRow(a, b) == 0 })
}

func (r *Raiser) tell(a Alert) {
	r.count.Alert(string(a.Kind))
	r.log.Error("alert", "kind", string(a.Kind), a.Kind.subject(), a.Subject, logging.EventID, a.EventID,
		logging.Attempts, a.Attempts, "detail", a.Detail)
	if r.hook != nil {
		r.hook.offer(a)
	}
}

type webhook struct {
	url    string
	client *http.Client
	log    *slog.Logger
	queue  chan Alert
}

// offer never waits: a webhook that hangs must not hold a worker.
func (w *webhook) offer(a Alert) {
	select {
	case w.queue <- a:
	default:
		w.log.Warn("alert webhook is behind, this alert stands in the table only", "kind", string(a.Kind), a.Kind.subject(), a.Subject)
	}
}

func (w *webhook) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case a := <-w.queue:
			if err := w.post(ctx, a); err != nil && ctx.Err() == nil {
				w.log.Warn("alert webhook failed, this alert stands in the table only", "kind", string(a.Kind), a.Kind.subject(), a.Subject, "error", err)
			}
		}
	}
}

func (w *webhook) post(ctx context.Context, a Alert) error {
	body, err := json.Marshal(map[string]any{
		"kind": a.Kind, "subject": a.Subject, "event_id": a.EventID,
		"attempts": a.Attempts, "detail": logging.Mask(a.Detail),
	})
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := w.client.Do(req)
	if err != nil {
		return fmt.Errorf("post: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 300 {
		return fmt.Errorf("webhook answered %s", resp.Status)
	}
	return nil
}
