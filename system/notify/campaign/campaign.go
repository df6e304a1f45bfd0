// Package campaign takes in the mails of a marketing campaign: any number in one
// call, read as a stream.
//
// For each batch the order is: insert the rows → publish their doorbells
// (confirmed and mandatory) → stamp them. Several batches are under way at once.
// It guarantees:
//
//   - The call may be repeated, whole or in part, whatever died and whenever: a
//     recipient has one row per campaign, whose key derives from the campaign and
//     the address ([contract.CampaignKey]); only rows without a stamp are
//     published again, and a copy of a message finds its row claimed. This holds
//     for as long as rows are kept (NOTIFYD_RETENTION, from the mail's end on): a
//     call that comes after that makes new mails.
//   - Memory is bounded by the batches under way, whatever the length of the call.
//   - What was inserted is published and stamped also when the caller goes away.
//   - A campaign that was stopped takes no mail (C-14). A stop that comes between
//     the look and the insert is honoured at the claim.
//
// Recipients and their data are neither logged nor named in an error. It must not
// import the AMQP or database client, nor net/http.
package campaign

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"mailproof/system/amqp"
	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/failpoint"
	"mailproof/system/mail"
	"mailproof/system/notify/doorbell"
	"mailproof/system/notify/metrics"
	"mailproof/system/notify/patience"
)

// Crash points between two steps.
const (
	fpAfterRead    = "campaign.after-read"
	fpAfterInsert  = "campaign.after-insert"
	fpAfterPublish = "campaign.after-publish"
	fpAfterStamp   = "campaign.after-stamp"
)

var (
	// ErrInvalid marks a request that no repetition repairs.
	ErrInvalid = errors.New("invalid campaign request")
	// ErrStopped: the campaign was stopped and takes no mail.
	ErrStopped = errors.New("the campaign was stopped")
	// ErrBody: the lines could not be read to their end.
	ErrBody = errors.New("the body broke off")
)

// LineError is a line that asks for no mail that could be sent. The lines before
// it are accepted.
type LineError struct {
	Line   int // from 1
	Reason string
}

func (e *LineError) Error() string { return fmt.Sprintf("line %d: %s", e.Line, e.Reason) }

// Store is what campaigns need of the row store.
type Store interface {
	Insert(ctx context.Context, rows []delivery.NewRow) ([]delivery.Inserted, error)
	StampPublished(ctx context.Context, ids []uuid.UUID) error
	CampaignStopped(ctx context.Context, id string) (*time.Time, error)
	StopCampaign(ctx context.Context, id string) error
	Campaign(ctx context.Context, id string) (delivery.CampaignState, error)
}

// Reports counts what the mail provider told of a campaign's mails after it had
// taken them, by event.
type Reports interface {
	OfCampaign(ctx context.Context, id string) (map[string]int64, error)
}

// Config of the service.
type Config struct {
	Store   Store
	Reports Reports
	Ring    doorbell.Ringer
	Retry   patience.Retrier
	Metrics *metrics.Set
	Log     *slog.Logger
	// Hopeless names database errors that no repetition repairs. nil: none.
	Hopeless func(error) bool
	// Tiers are the marketing lane's delay tiers, rising: mails with a time from
	// which they may be sent wait there.
	Tiers []time.Duration
	// Step bounds one step of one batch (insert, publish, stamp): a caller
	// learns of a database or broker that is away for longer than that.
	Step time.Duration
	// Batch is the mails of one insert at most, default 500: beyond that a
	// statement's cost is its rows'. Window is the batches under way at once,
	// default 4: one each at the database and at the broker, one to follow.
	Batch, Window int
	// Now is the wall clock, compared with SendAfter; nil means time.Now. It
	// chooses the first queue of a message, never whether a mail is sent.
	Now func() time.Time
}

// Service takes campaigns in, shows and stops them.
type Service struct{ cfg Config }

// New makes the service.
func New(cfg Config) *Service {
	if cfg.Batch == 0 {
		cfg.Batch = 500
	}
	if cfg.Window == 0 {
		cfg.Window = 4
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Service{cfg: cfg}
}

// Request is one call, or one of several, for a campaign's mails.
type Request struct {
	ID       string
	Template string // one of [mail.CampaignTemplates]
	// SendAfter and ExpiresAt bound when the mails of this call may be sent, by
	// the database's clock; nil: they do not. A mail that waits past ExpiresAt
	// becomes EXPIRED and is not sent.
	SendAfter, ExpiresAt *time.Time
	// Lines of JSON, see [Line].
	Lines io.Reader
}

func (r Request) validate() error {
	if err := contract.CheckCampaignID(r.ID); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if !slices.Contains(mail.CampaignTemplates(), r.Template) {
		return fmt.Errorf("%w: there is no campaign template %q, there are: %s", ErrInvalid, r.Template, strings.Join(mail.CampaignTemplates(), ", "))
	}
	if r.SendAfter != nil && r.ExpiresAt != nil && !r.SendAfter.Before(*r.ExpiresAt) {
		return fmt.Errorf("%w: the mails expire before they may be sent", ErrInvalid)
	}
	return nil
}

// Receipt says what became of a call: Read mails were read, New of them have a
// row since, and Known had one before. After an error it covers what was done
// until then.
type Receipt struct {
	Campaign string `json:"campaign"`
	Read     int    `json:"read"`
	New      int    `json:"new"`
	Known    int    `json:"known"`
}

// Send accepts the mails of one call. After nil each of them has a row and a
// confirmed message. A [LineError], [ErrStopped] or [ErrBody] leaves what came
// before it accepted in the same sense. After any other error some mails may wait
// for the sweeper, and repeating the call finishes them.
func (s *Service) Send(ctx context.Context, r Request) (Receipt, error) {
	in := &intake{service: s, request: r, receipt: Receipt{Campaign: r.ID}}
	if err := r.validate(); err != nil {
		return in.receipt, err
	}
	err := in.run(ctx)
	receipt := in.receipt
	s.cfg.Metrics.Campaign("new", receipt.New)
	s.cfg.Metrics.Campaign("known", receipt.Known)
	log := s.cfg.Log.With("campaign", r.ID, "read", receipt.Read, "new", receipt.New, "known", receipt.Known)
	if err != nil {
		log.Warn("campaign taken in as far as it went", "error", err)
		return receipt, err
	}
	log.Info("campaign taken in")
	return receipt, nil
}

// Stop sets the flag that each claim of the campaign's mails reads. It may be
// repeated.
func (s *Service) Stop(ctx context.Context, id string) error {
	if err := contract.CheckCampaignID(id); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if err := s.step(ctx, "stop campaign", func(ctx context.Context) error { return s.cfg.Store.StopCampaign(ctx, id) }); err != nil {
		return err
	}
	s.cfg.Log.Warn("campaign stopped", "campaign", id)
	return nil
}

// Show counts a campaign's mails.
func (s *Service) Show(ctx context.Context, id string) (State, error) {
	if err := contract.CheckCampaignID(id); err != nil {
		return State{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	var c delivery.CampaignState
	var reports map[string]int64
	err := s.step(ctx, "count campaign", func(ctx context.Context) error {
		var err error
		if c, err = s.cfg.Store.Campaign(ctx, id); err != nil {
			return err
		}
		reports, err = s.cfg.Reports.OfCampaign(ctx, id)
		return err
	})
	state := stateOf(id, c)
	state.Reports = reports
	return state, err
}

// step repeats f until it succeeds or its time is over.
func (s *Service) step(ctx context.Context, duty string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Step)
	defer cancel()
	if err := s.cfg.Retry.Do(ctx, duty, s.cfg.Hopeless, f); err != nil {
		return fmt.Errorf("%s: %w", duty, err)
	}
	return nil
}

// intake is one call under way.
type intake struct {
	service *Service
	request Request

	mu      sync.Mutex
	receipt Receipt
}

// run reads the lines and hands batches on.
func (in *intake) run(ctx context.Context) error {
	if err := in.refuseStopped(ctx); err != nil {
		return err
	}
	// Batches that were read are carried to their end also when the caller is
	// gone; each step has its bound.
	group, carry := errgroup.WithContext(context.WithoutCancel(ctx))
	group.SetLimit(in.service.cfg.Window)
	lines := newLines(in.request.Lines, in.service.cfg.Batch)
	var readErr error
	for readErr == nil && carry.Err() == nil {
		var batch []Line
		batch, readErr = lines.batch()
		if len(batch) == 0 {
			continue
		}
		in.count(func(r *Receipt) { r.Read += len(batch) })
		failpoint.At(fpAfterRead)
		group.Go(func() error { return in.accept(carry, batch) })
	}
	// A batch that failed says more than the end of the lines.
	if err := group.Wait(); err != nil {
		return err
	}
	if errors.Is(readErr, io.EOF) {
		return nil
	}
	return readErr
}

func (in *intake) count(f func(*Receipt)) {
	in.mu.Lock()
	defer in.mu.Unlock()
	f(&in.receipt)
}

func (in *intake) refuseStopped(ctx context.Context) error {
	var at *time.Time
	err := in.service.step(ctx, "look whether the campaign is stopped", func(ctx context.Context) error {
		var err error
		at, err = in.service.cfg.Store.CampaignStopped(ctx, in.request.ID)
		return err
	})
	if err == nil && at != nil {
		err = ErrStopped
	}
	return err
}

// accept carries one batch: insert → publish → stamp.
func (in *intake) accept(ctx context.Context, batch []Line) error {
	if ctx.Err() != nil {
		return ctx.Err() // another batch failed
	}
	if err := in.refuseStopped(ctx); err != nil {
		return err
	}
	ids, bells, err := in.insert(ctx, batch)
	if err != nil {
		return err
	}
	failpoint.At(fpAfterInsert)
	if len(ids) == 0 {
		return nil
	}
	if err := in.publish(ctx, bells); err != nil {
		return err
	}
	failpoint.At(fpAfterPublish)
	err = in.service.step(ctx, "stamp rows", func(ctx context.Context) error { return in.service.cfg.Store.StampPublished(ctx, ids) })
	if err != nil {
		return err
	}
	failpoint.At(fpAfterStamp)
	return nil
}

// insert makes the rows that are missing and returns those that need a message.
func (in *intake) insert(ctx context.Context, batch []Line) ([]uuid.UUID, []amqp.Message, error) {
	rows := make([]delivery.NewRow, len(batch))
	for i, l := range batch {
		var err error
		if rows[i], err = in.row(l); err != nil {
			return nil, nil, err
		}
	}
	var found []delivery.Inserted
	err := in.service.step(ctx, "insert rows", func(ctx context.Context) error {
		var err error
		found, err = in.service.cfg.Store.Insert(ctx, rows)
		if err == nil && len(found) != len(rows) {
			err = fmt.Errorf("insert answered for %d of %d rows", len(found), len(rows))
		}
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	var ids []uuid.UUID
	var bells []amqp.Message
	rung := map[uuid.UUID]bool{} // a recipient may be listed twice in a batch
	made := 0
	for i, f := range found {
		if f.New {
			made++
		}
		if f.NeedsDoorbell() && !rung[f.ID] {
			rung[f.ID] = true
			ids, bells = append(ids, f.ID), append(bells, in.bell(f.ID, rows[i]))
		}
	}
	in.count(func(r *Receipt) { r.New += made; r.Known += len(batch) - made })
	return ids, bells, nil
}

func (in *intake) row(l Line) (delivery.NewRow, error) {
	payload, err := marshal(contract.CampaignMail{Template: in.request.Template, Data: l.Data})
	if err != nil {
		return delivery.NewRow{}, err
	}
	key := contract.CampaignKey(in.request.ID, l.To)
	return delivery.NewRow{
		// No event asks for it: its key is what makes a second one the same.
		DedupeKey: key, EventID: key, CampaignID: in.request.ID,
		Type: contract.Marketing, Channel: contract.Email, Recipient: l.To, Payload: payload, Generation: 1,
		SendAfter: in.request.SendAfter, ExpiresAt: in.request.ExpiresAt,
	}, nil
}

// bell goes to the main queue, or waits in a tier for a mail whose time has not
// come: a claim would only send it there.
func (in *intake) bell(id uuid.UUID, row delivery.NewRow) amqp.Message {
	b := doorbell.Bell{
		ID: id, DedupeKey: row.DedupeKey, EventID: row.EventID, Type: row.Type, Channel: row.Channel,
		Recipient: row.Recipient, Template: in.request.Template, Payload: row.Payload,
	}
	if row.SendAfter != nil && len(in.service.cfg.Tiers) > 0 {
		if wait := row.SendAfter.Sub(in.service.cfg.Now()); wait > 0 {
			return doorbell.Later(b, doorbell.Tier(in.service.cfg.Tiers, wait))
		}
	}
	return doorbell.Main(b)
}

func (in *intake) publish(ctx context.Context, bells []amqp.Message) error {
	ctx, cancel := context.WithTimeout(ctx, in.service.cfg.Step)
	defer cancel()
	if err := in.service.cfg.Ring.Ring(ctx, bells...); err != nil {
		return fmt.Errorf("publish %d messages: %w", len(bells), err)
	}
	return nil
}
