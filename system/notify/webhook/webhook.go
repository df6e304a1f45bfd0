// Package webhook hears what the mail provider tells of mails that it took: the
// third way, beside its log and its list, to learn what became of a mail that is
// UNKNOWN, and the only one to learn that a mail came back (A2-14).
//
//	email.sent, delivered, delivery_delayed,    the provider has a copy: UNKNOWN becomes SENT
//	opened, clicked
//	email.bounced, failed, suppressed           the same, EmailBounced is told, and the
//	                                            reason is kept in table provider_reports
//	email.complained                            the same without EmailBounced: it arrived
//	any other event                             nothing
//
// What it guarantees:
//
//   - Nobody but the provider is heard: each request carries a signature over
//     its id, its time and its body (Svix; https://docs.svix.com/receiving/verifying-payloads/how-manual),
//     and one that is older or newer than five minutes is refused.
//   - A request is answered with 2xx only when what it says is durable. The
//     provider repeats every other one; that is also how an event is put off
//     that comes before the outcome of the try is known.
//   - Duplicates and any order are harmless: SENT is final, and a bounce is one
//     event and one report however often it is told.
//   - Absence is never concluded: an event that did not come proves nothing.
//
// It must not send mails, and must not import a mail client.
package webhook

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"mailproof/system/delivery"
	"mailproof/system/notify/logging"
)

// Tolerance is how far a request's time may be from this machine's, as Svix
// recommends it.
const Tolerance = 5 * time.Minute

// maxBody bounds a request; an event has a few hundred bytes.
const maxBody = 256 << 10

// Store is what the handler needs of the row store.
type Store interface {
	ByKey(ctx context.Context, key string) (delivery.Row, error)
	Found(ctx context.Context, id uuid.UUID, providerID string) (delivery.Outcome, error)
	Bounced(ctx context.Context, key string) error
}

// ReportStore keeps what came of a mail after it was taken; false: it was told
// before. [Reports] is one.
type ReportStore interface {
	Write(ctx context.Context, mail uuid.UUID, r Report) (bool, error)
}

// Result of one request.
type Result string

// The results, labels of the metric.
const (
	Found   Result = "found"    // a mail that was UNKNOWN is SENT
	Known   Result = "known"    // it was SENT already
	Bounced Result = "bounced"  // it came back: EmailBounced is told, if it was a booking's
	NotYet  Result = "not-yet"  // its try has not ended: the provider shall repeat it
	Ignored Result = "ignored"  // no mail of ours, or an event that says nothing
	Refused Result = "refused"  // not signed by the provider, or too old
	Failing Result = "failed"   // the database is away: the provider shall repeat it
	Against Result = "conflict" // the provider has a copy of a mail that ended unsent
)

// Results lists them.
func Results() []string {
	var out []string
	for _, r := range []Result{Found, Known, Bounced, NotYet, Ignored, Refused, Failing, Against} {
		out = append(out, string(r))
	}
	return out
}

// Counter counts requests by result, and reports by lane and event: each report
// once.
type Counter interface {
	Webhook(result string)
	ProviderReport(lane, event string)
}

// Config of the handler.
type Config struct {
	// Secret is the webhook's signing secret, whsec_ and base64.
	Secret  string
	Store   Store
	Reports ReportStore
	// KeyOf reads the key from the tag that the mails carry; Tag is its name.
	Tag   string
	KeyOf func(tag string) (key string, ok bool)
	Count Counter
	Log   *slog.Logger
	// Now is the time of day; default time.Now.
	Now func() time.Time
	// Timeout bounds the statements of one request.
	Timeout time.Duration
}

// Handler answers the provider's requests.
type Handler struct {
	cfg    Config
	secret []byte
}

var _ http.Handler = (*Handler)(nil)

// New makes a handler.
func New(cfg Config) (*Handler, error) {
	secret, err := ParseSecret(cfg.Secret)
	if err != nil {
		return nil, err
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Handler{cfg, secret}, nil
}

// ParseSecret reads a signing secret. Its error does not quote it.
func ParseSecret(s string) ([]byte, error) {
	text, ok := strings.CutPrefix(s, "whsec_")
	secret, err := base64.StdEncoding.DecodeString(text)
	if !ok || err != nil || len(secret) < 16 {
		return nil, errors.New("must be whsec_ and the base64 of at least 16 bytes")
	}
	return secret, nil
}

// ServeHTTP answers one event.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		h.done(w, Refused, http.StatusBadRequest, "the request was not read", slog.Any("error", err))
		return
	}
	if err := h.verify(r.Header, body); err != nil {
		h.done(w, Refused, http.StatusUnauthorized, "webhook refused", slog.Any("error", err))
		return
	}
	var e event
	if err := json.Unmarshal(body, &e); err != nil {
		// Signed and not readable: a repetition would not change it.
		h.done(w, Ignored, http.StatusOK, "webhook not readable", slog.Any("error", err))
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), h.cfg.Timeout)
	defer cancel()
	h.hear(ctx, w, e)
}

// event is the part of a webhook's body that counts here.
type event struct {
	Type string `json:"type"`
	Data struct {
		EmailID string `json:"email_id"`
		Tags    tags   `json:"tags"`
		// One of them in an event of that type.
		Bounce     reason `json:"bounce"`
		Failed     reason `json:"failed"`
		Suppressed reason `json:"suppressed"`
	} `json:"data"`
}

// reason that the provider gives, with the fields that it has for any type.
type reason struct {
	Type       string   `json:"type"`
	SubType    string   `json:"subType"`
	Reason     string   `json:"reason"`
	Message    string   `json:"message"`
	Diagnostic []string `json:"diagnosticCode"`
}

func (r reason) String() string {
	words := append([]string{r.Type, r.SubType, r.Reason, r.Message}, r.Diagnostic...)
	return strings.Join(slices.DeleteFunc(words, func(s string) bool { return s == "" }), ", ")
}

// reason of the event; at most one of the three is there.
func (e event) reason() string {
	return e.Data.Bounce.String() + e.Data.Failed.String() + e.Data.Suppressed.String()
}

// tags are an object of names and values, or a list of both as in the API.
type tags map[string]string

func (t *tags) UnmarshalJSON(b []byte) error {
	var list []struct{ Name, Value string }
	if err := json.Unmarshal(b, &list); err == nil {
		*t = tags{}
		for _, x := range list {
			(*t)[x.Name] = x.Value
		}
		return nil
	}
	var m map[string]string
	err := json.Unmarshal(b, &m)
	*t = m
	return err
}

// meaning of an event beyond that the provider has a copy.
type meaning struct {
	// reported under this name; empty: nothing more is to be known.
	reported string
	// returned: nobody will have read the mail.
	returned bool
}

// meanings of the events (https://resend.com/docs/webhooks/event-types). failed
// comes when the provider gives up a mail that it took, suppressed when it did
// not try since the address is on the account's list.
var meanings = map[string]meaning{
	"email.sent": {}, "email.delivered": {}, "email.delivery_delayed": {}, "email.opened": {}, "email.clicked": {},
	"email.bounced": {"bounced", true}, "email.failed": {"failed", true}, "email.suppressed": {"suppressed", true},
	"email.complained": {"complained", false},
}

// Events lists what a report may be about.
func Events() []string {
	var out []string
	for _, m := range meanings {
		if m.reported != "" {
			out = append(out, m.reported)
		}
	}
	slices.Sort(out)
	return out
}

func (h *Handler) hear(ctx context.Context, w http.ResponseWriter, e event) {
	key, tagged := h.cfg.KeyOf(e.Data.Tags[h.cfg.Tag])
	means, tells := meanings[e.Type]
	at := []any{logging.DedupeKey, key, logging.ProviderID, e.Data.EmailID, "type", e.Type}
	if !tagged || !tells || e.Data.EmailID == "" {
		h.done(w, Ignored, http.StatusOK, "webhook says nothing of a mail of ours", at...)
		return
	}
	row, res, err := h.settle(ctx, key, e.Data.EmailID)
	if err == nil && means.reported != "" && (res == Found || res == Known) {
		if err = h.report(ctx, row, means, e); err == nil && means.returned {
			res = Bounced
		}
	}
	switch {
	case err != nil:
		h.done(w, Failing, http.StatusServiceUnavailable, "webhook not written down", append(at, "error", err)...)
	case res == NotYet:
		h.done(w, res, http.StatusServiceUnavailable, "webhook comes before the try has ended", at...)
	default:
		h.done(w, res, http.StatusOK, "webhook heard", at...)
	}
}

// report keeps what became of a mail that is SENT, and tells the booking side of
// one that came back. Either may be repeated.
func (h *Handler) report(ctx context.Context, row delivery.Row, means meaning, e event) error {
	if means.returned {
		if err := h.cfg.Store.Bounced(ctx, row.DedupeKey); err != nil {
			return err
		}
	}
	fresh, err := h.cfg.Reports.Write(ctx, row.ID, Report{Event: means.reported, ProviderID: e.Data.EmailID, Reason: e.reason()})
	if err == nil && fresh {
		h.cfg.Count.ProviderReport(row.Type.Lane(), means.reported)
	}
	return err
}

// settle makes a row SENT whose copy the provider has.
func (h *Handler) settle(ctx context.Context, key, providerID string) (delivery.Row, Result, error) {
	row, err := h.cfg.Store.ByKey(ctx, key)
	if errors.Is(err, delivery.ErrNoRow) {
		return row, Ignored, nil
	}
	if err != nil {
		return row, Failing, err
	}
	if row.Status == delivery.Unknown {
		out, err := h.cfg.Store.Found(ctx, row.ID, providerID)
		if err != nil {
			return row, Failing, err
		}
		if out.Applied {
			return out.Row, Found, nil
		}
		row = out.Row
	}
	switch row.Status {
	case delivery.Sent:
		return row, Known, nil
	case delivery.Dead, delivery.Cancelled, delivery.Expired:
		return row, Against, nil
	default:
		// A worker has it, or it waits for one: the outcome of the try that made
		// this copy is not written down yet.
		return row, NotYet, nil
	}
}

// verify checks signature and time. A header may carry several signatures, old
// and new secret's, apart by spaces.
func (h *Handler) verify(head http.Header, body []byte) error {
	id, at, signatures := head.Get("svix-id"), head.Get("svix-timestamp"), head.Get("svix-signature")
	if id == "" || at == "" || signatures == "" {
		return errors.New("it is not signed")
	}
	seconds, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return errors.New("its time is no number")
	}
	mac := hmac.New(sha256.New, h.secret)
	_, _ = fmt.Fprintf(mac, "%s.%s.", id, at)
	_, _ = mac.Write(body)
	want := mac.Sum(nil)
	signed := false
	for s := range strings.FieldsSeq(signatures) {
		version, text, _ := strings.Cut(s, ",")
		got, err := base64.StdEncoding.DecodeString(text)
		signed = signed || version == "v1" && err == nil && hmac.Equal(got, want)
	}
	if !signed {
		return errors.New("its signature is not the provider's")
	}
	if off := h.cfg.Now().Sub(time.Unix(seconds, 0)).Abs(); off > Tolerance {
		return fmt.Errorf("it was signed %s away from now, more than %s", off.Round(time.Second), Tolerance)
	}
	return nil
}

func (h *Handler) done(w http.ResponseWriter, res Result, status int, text string, args ...any) {
	h.cfg.Count.Webhook(string(res))
	level := slog.LevelInfo
	if res == Refused || res == Failing || res == Against {
		level = slog.LevelWarn
	}
	h.cfg.Log.With(args...).Log(context.Background(), level, text, "result", string(res))
	w.WriteHeader(status)
}
