package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"time"

	"mailproof/system/contract"
	"mailproof/system/delivery"
	"mailproof/system/notify/dlq"
)

// Operator carries out what people decide about dead mails.
type Operator interface {
	List(ctx context.Context, f delivery.DeadFilter, limit int) ([]delivery.Row, error)
	Inspect(ctx context.Context, key string) (dlq.Dossier, error)
	Replay(ctx context.Context, r dlq.ReplayRequest) (dlq.Report, error)
	Discard(ctx context.Context, r dlq.DiscardRequest) (dlq.Report, error)
	SendAgain(ctx context.Context, key, actor, reason string) (delivery.Row, error)
}

// dlqRoutes are those of the dead-letter queue. All that change something are POST with a
// JSON body, so that no web page can make a browser send them.
func (s *Server) dlqRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET /admin/dlq", s.list)
	mux.HandleFunc("GET /admin/mail", s.inspect)
	mux.HandleFunc("POST /admin/dlq/replay", s.replay)
	mux.HandleFunc("POST /admin/dlq/discard", s.discard)
	mux.HandleFunc("POST /admin/mail/send-again", s.sendAgain)
}

// order is the body of each POST.
type order struct {
	Type      string  `json:"type"`
	Reason    string  `json:"reason"` // part of the last error
	OlderThan string  `json:"older_than"`
	Key       string  `json:"key"`
	Booking   string  `json:"booking"`
	All       bool    `json:"all"` // needed where nothing else chooses
	Attempts  int     `json:"attempts"`
	Rate      float64 `json:"rate"`
	DryRun    bool    `json:"dry_run"`
	// RenderAnew of a replay: see [dlq.ReplayRequest].
	RenderAnew bool   `json:"render_anew"`
	Actor      string `json:"actor"`
	Why        string `json:"why"`
}

func (o order) filter() (delivery.DeadFilter, error) {
	return Filter(o.Type, o.Reason, o.OlderThan, o.Key, o.Booking)
}

// Filter makes a filter from what a person wrote; empty words choose all.
func Filter(mailType, reason, olderThan, key, booking string) (delivery.DeadFilter, error) {
	f := delivery.DeadFilter{Reason: reason, DedupeKey: key, BookingID: booking}
	switch mailType {
	case "":
	case "ticket", string(contract.TicketConfirmation):
		f.Type = string(contract.TicketConfirmation)
	case "marketing", string(contract.Marketing):
		f.Type = string(contract.Marketing)
	default:
		return f, fmt.Errorf("%w: type %q is not known, there are ticket and marketing", dlq.ErrInvalid, mailType)
	}
	if olderThan == "" {
		return f, nil
	}
	d, err := time.ParseDuration(olderThan)
	if err != nil || d < 0 {
		return f, fmt.Errorf("%w: older than %q is not a duration such as 90s, 10m, 24h", dlq.ErrInvalid, olderThan)
	}
	f.OlderThan = d
	return f, nil
}

// Chooses refuses a change of all dead mails that nobody asked for in so many
// words.
func Chooses(f delivery.DeadFilter, all bool) error {
	if f == (delivery.DeadFilter{}) && !all {
		return fmt.Errorf("%w: nothing chooses the mails; give a filter, or say that all are meant", dlq.ErrInvalid)
	}
	return nil
}

func (s *Server) list(w http.ResponseWriter, r *http.Request) {
	limit, err := limitOf(r)
	if err != nil {
		s.refuse(w, fmt.Errorf("%w: %w", dlq.ErrInvalid, err))
		return
	}
	q := r.URL.Query()
	f, err := Filter(q.Get("type"), q.Get("reason"), q.Get("older_than"), q.Get("key"), q.Get("booking"))
	if err != nil {
		s.refuse(w, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), s.cfg.CheckTimeout)
	defer cancel()
	rows, err := s.cfg.Operator.List(ctx, f, limit)
	if err != nil {
		s.refuse(w, err)
		return
	}
	s.answer(w, http.StatusOK, dlq.Views(rows))
}

func (s *Server) inspect(w http.ResponseWriter, r *http.Request) {
	d, err := s.cfg.Operator.Inspect(r.Context(), r.URL.Query().Get("key"))
	if err != nil {
		s.refuse(w, err)
		return
	}
	s.answer(w, http.StatusOK, d.View())
}

func (s *Server) replay(w http.ResponseWriter, r *http.Request) {
	o, f, err := s.order(r)
	if err == nil {
		err = Chooses(f, o.All)
	}
	if err != nil {
		s.refuse(w, err)
		return
	}
	if o.Attempts == 0 {
		o.Attempts = s.cfg.ReplayAttempts
	}
	report, err := s.cfg.Operator.Replay(r.Context(), dlq.ReplayRequest{
		Filter: f, Attempts: o.Attempts, Rate: o.Rate, DryRun: o.DryRun, Actor: o.Actor, Reason: o.Why,
		RenderAnew: o.RenderAnew,
	})
	s.report(w, report, err)
}

func (s *Server) discard(w http.ResponseWriter, r *http.Request) {
	o, f, err := s.order(r)
	if err == nil {
		err = Chooses(f, o.All)
	}
	if err != nil {
		s.refuse(w, err)
		return
	}
	report, err := s.cfg.Operator.Discard(r.Context(), dlq.DiscardRequest{Filter: f, DryRun: o.DryRun, Actor: o.Actor, Reason: o.Why})
	s.report(w, report, err)
}

func (s *Server) sendAgain(w http.ResponseWriter, r *http.Request) {
	o, _, err := s.order(r)
	if err != nil {
		s.refuse(w, err)
		return
	}
	row, err := s.cfg.Operator.SendAgain(r.Context(), o.Key, o.Actor, o.Why)
	if err != nil {
		s.refuse(w, err)
		return
	}
	s.answer(w, http.StatusCreated, dlq.View(row))
}

// report tells also of what was done before a failure.
func (s *Server) report(w http.ResponseWriter, report dlq.Report, err error) {
	if err == nil {
		s.answer(w, http.StatusOK, report)
		return
	}
	status, text := s.failure(err)
	s.answer(w, status, map[string]any{"error": text, "done": report})
}

const maxOrder = 64 << 10

func (s *Server) order(r *http.Request) (order, delivery.DeadFilter, error) {
	var o order
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "application/json" {
		return o, delivery.DeadFilter{}, fmt.Errorf("%w: Content-Type must be application/json", dlq.ErrInvalid)
	}
	dec := json.NewDecoder(http.MaxBytesReader(nil, r.Body, maxOrder))
	dec.DisallowUnknownFields() // a filter with a typing error would choose everything
	if err := dec.Decode(&o); err != nil {
		return o, delivery.DeadFilter{}, fmt.Errorf("%w: body: %w", dlq.ErrInvalid, err)
	}
	f, err := o.filter()
	return o, f, err
}

func (s *Server) refuse(w http.ResponseWriter, err error) {
	status, text := s.failure(err)
	s.answer(w, status, map[string]string{"error": text})
}

func (s *Server) failure(err error) (int, string) {
	var again *delivery.SendAgainRefused
	switch {
	case errors.Is(err, dlq.ErrInvalid):
		return http.StatusBadRequest, err.Error()
	case errors.Is(err, delivery.ErrNoRow):
		return http.StatusNotFound, delivery.ErrNoRow.Error()
	case errors.As(err, &again):
		return http.StatusConflict, again.Error()
	}
	s.cfg.Log.Warn("request about dead mails failed", "error", err)
	return http.StatusServiceUnavailable, "the database or the broker did not answer; repeat the request"
}
