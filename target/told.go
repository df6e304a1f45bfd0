package target

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"mailproof/system/contract"
)

// MailTold is what the booking service tells its client of the booking's mail:
// pending, sent, failed, cancelled, too-late; "" of a booking that was never
// confirmed.
func (p *Pipeline) MailTold(ctx context.Context, booking string) (string, error) {
	addr := p.bookings.pick(p.bookings.turn.Load())
	if addr == "" {
		return "", errors.New("no booking process listens")
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/bookings/"+booking, nil)
	if err != nil {
		return "", fmt.Errorf("booking %s: %w", booking, err)
	}
	resp, err := p.bookings.http.Do(req)
	if err != nil {
		return "", fmt.Errorf("booking %s: %w", booking, err)
	}
	defer func() { _ = resp.Body.Close() }() // only read
	var body struct {
		Mail struct{ Status string }
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("booking %s: %s", booking, resp.Status)
	}
	if err := json.NewDecoder(resp.Body).Decode(&body); err != nil {
		return "", fmt.Errorf("booking %s: %w", booking, err)
	}
	return body.Mail.Status, nil
}

// Counted is the value of one metric of a process, by its name and labels as
// they are printed; 0 where it has not been counted yet.
func (p *Pipeline) Counted(ctx context.Context, process, metric string) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.Addr(process)+"/metrics", http.NoBody)
	if err != nil {
		return 0, fmt.Errorf("metrics of %s: %w", process, err)
	}
	resp, err := p.bookings.http.Do(req)
	if err != nil {
		return 0, fmt.Errorf("metrics of %s: %w", process, err)
	}
	defer func() { _ = resp.Body.Close() }() // only read
	in := bufio.NewScanner(resp.Body)
	for in.Scan() {
		if value, ok := strings.CutPrefix(in.Text(), metric+" "); ok {
			return strconv.ParseFloat(value, 64)
		}
	}
	return 0, in.Err()
}

const (
	eventSQL = `
SELECT payload::text FROM outbox WHERE key = $1 AND event_type = $2 AND (payload->>'generation')::int = $3`
	unpublishedSQL = `SELECT id FROM outbox WHERE key = $1 AND published_at IS NULL`
)

// RepeatCancel waits until everything about the booking is published, and puts
// its cancel event of that generation on the topic once more, byte for byte:
// what a relay that died before its mark does, however late.
func (p *Pipeline) RepeatCancel(ctx context.Context, booking string, generation int) error {
	if err := p.awaitPublished(ctx, booking); err != nil {
		return err
	}
	body, err := p.event(ctx, booking, contract.BookingCancelled, generation)
	if err != nil {
		return err
	}
	return p.produce(ctx, booking, body)
}

// RepeatConfirm puts the booking's first confirmation on the topic once more, as
// soon as it is published: byte for byte, or as an event of another id.
func (p *Pipeline) RepeatConfirm(ctx context.Context, booking string, foreign bool) error {
	if err := p.awaitPublished(ctx, booking); err != nil {
		return err
	}
	body, err := p.event(ctx, booking, contract.BookingConfirmed, 1)
	if err != nil {
		return err
	}
	if foreign {
		e, err := contract.DecodeEvent(body)
		if err != nil {
			return err
		}
		e.EventID = uuid.NewString()
		if body, err = json.Marshal(e); err != nil {
			return fmt.Errorf("event of %s: %w", booking, err)
		}
	}
	return p.produce(ctx, booking, body)
}

// event is the one of that type and generation that the booking's outbox holds.
func (p *Pipeline) event(ctx context.Context, booking string, t contract.EventType, generation int) ([]byte, error) {
	bodies, err := query(ctx, p.dbs[bookingDB], string(t)+" of "+booking, eventSQL, pgx.RowTo[string], booking, string(t), generation)
	if err != nil {
		return nil, err
	}
	if len(bodies) != 1 {
		return nil, fmt.Errorf("booking %s has %d events %s of generation %d", booking, len(bodies), t, generation)
	}
	return []byte(bodies[0]), nil
}

// CancelOvertakes puts a cancel of a booking on the topic that has no event there
// yet: what a relay without an order does to a booking that is confirmed and
// cancelled at once (TRAP-2-7, LAB-TOMB).
func (p *Pipeline) CancelOvertakes(ctx context.Context, booking, recipient string) error {
	id, err := uuid.NewV7()
	if err != nil {
		return fmt.Errorf("cancel of %s: %w", booking, err)
	}
	body, err := json.Marshal(contract.Event{
		EventID: id.String(), EventType: contract.BookingCancelled, Version: contract.EventVersion, OccurredAt: time.Now(),
		BookingID: booking, Generation: 1, DedupeKey: contract.TicketKey(booking, 1), Data: contract.EventData{Recipient: recipient},
	})
	if err != nil {
		return fmt.Errorf("cancel of %s: %w", booking, err)
	}
	return p.produce(ctx, booking, body)
}

// produce as the relay does: records of a booking come to one partition.
func (p *Pipeline) produce(ctx context.Context, booking string, body []byte) error {
	producer, err := kgo.NewClient(kgo.SeedBrokers(p.cfg.Stack.Kafka().Brokers()...), kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)))
	if err != nil {
		return fmt.Errorf("produce for %s: %w", booking, err)
	}
	defer producer.Close()
	if err := producer.ProduceSync(ctx, &kgo.Record{Topic: p.topic, Key: []byte(booking), Value: body}).FirstErr(); err != nil {
		return fmt.Errorf("produce for %s: %w", booking, err)
	}
	return nil
}

// awaitPublished returns when no event of the booking waits in the outbox.
func (p *Pipeline) awaitPublished(ctx context.Context, booking string) error {
	for {
		left, err := query(ctx, p.dbs[bookingDB], "events of "+booking, unpublishedSQL, pgx.RowTo[int64], booking)
		if err != nil || len(left) == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d events of booking %s are not published: %w", len(left), booking, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// adminTimeout of a request to the mail service's operators' side: a replay
// answers when all its mails are on their way.
const adminTimeout = 2 * time.Minute

// DeadCount is how many dead mails the mail service lists, at most 1000.
func (p *Pipeline) DeadCount(ctx context.Context) (int, error) {
	var list []struct{}
	err := p.admin(ctx, http.MethodGet, "/admin/dlq?limit=1000", nil, &list)
	return len(list), err
}

const deadSQL = `SELECT count(*) FROM notifications WHERE status = 'DEAD'`

// Dead is how many mails are DEAD; each of them has one dead letter.
func (p *Pipeline) Dead(ctx context.Context) (int, error) {
	n, err := query(ctx, p.dbs[notifyDB], "dead mails", deadSQL, pgx.RowTo[int])
	if err != nil {
		return 0, err
	}
	return n[0], nil
}

// ReplayReport is what a replay did, by mails and by dead letters.
type ReplayReport struct {
	Matched  int `json:"matched"`
	Replayed int `json:"replayed"`
	Refused  int `json:"refused"`
	Letters  struct {
		Removed int `json:"removed"`
	} `json:"letters"`
}

// ReplayDead gives every dead mail more tries, at so many mails per second (0:
// as fast as it goes).
func (p *Pipeline) ReplayDead(ctx context.Context, attempts int, rate float64) (ReplayReport, error) {
	var r ReplayReport
	err := p.admin(ctx, http.MethodPost, "/admin/dlq/replay", map[string]any{
		"all": true, "attempts": attempts, "rate": rate, "actor": "mailproof", "why": "the server is healed",
	}, &r)
	return r, err
}

func (p *Pipeline) admin(ctx context.Context, method, path string, body, into any) error {
	return p.adminOf(ctx, "notifyd-1", method, path, body, into)
}

func (p *Pipeline) adminOf(ctx context.Context, process, method, path string, body, into any) error {
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	raw, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+p.Addr(process)+path, bytes.NewReader(raw))
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	req.Header.Set("Content-Type", "application/json")
	// Without the customers' client, whose requests end sooner.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	defer func() { _ = resp.Body.Close() }() // only read
	if resp.StatusCode >= 300 {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // for the error alone
		return fmt.Errorf("%s: %s: %s", path, resp.Status, text)
	}
	if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}
