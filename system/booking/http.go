package booking

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// maxBody of a request, in bytes.
const maxBody = 64 << 10

// API is the service over HTTP. Every answer is JSON; an error is
//
//	{"error": {"code": "conflict", "message": "…"}}
//
// with the codes invalid (400), not_found (404), conflict (409), too_large
// (413), unknown (503: it may have happened, repeat) and unavailable (503: it
// did not happen, repeat).
type API struct {
	service  *Service
	log      *slog.Logger
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
}

// NewAPI makes the handlers and registers their metrics.
func NewAPI(s *Service, reg prometheus.Registerer, log *slog.Logger) *API {
	a := &API{
		service: s, log: log,
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "booking_requests_total", Help: "Requests by operation and result.",
		}, []string{"op", "result"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "booking_request_seconds", Help: "Time to answer, by operation.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}, []string{"op"}),
	}
	reg.MustRegister(a.requests, a.seconds)
	return a
}

// Register adds the routes to mux.
func (a *API) Register(mux *http.ServeMux) {
	mux.HandleFunc("POST /bookings", a.handle("create", a.create))
	mux.HandleFunc("GET /bookings/{id}", a.handle("get", a.get))
	for _, op := range []Op{Confirm, Cancel, Reopen} {
		mux.HandleFunc("POST /bookings/{id}/"+string(op), a.handle(string(op), a.do(op)))
	}
}

// reply is what a handler answers with.
type reply struct {
	status int
	body   any
}

func (a *API) handle(op string, h func(*http.Request) (reply, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		begin := time.Now()
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		rep, err := h(r)
		result := "ok"
		if err != nil {
			rep, result = a.failure(r, op, err)
		}
		a.write(w, rep)
		a.requests.WithLabelValues(op, result).Inc()
		a.seconds.WithLabelValues(op).Observe(time.Since(begin).Seconds())
	}
}

func (a *API) write(w http.ResponseWriter, rep reply) {
	w.Header().Set("Content-Type", "application/json")
	if rep.status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	w.WriteHeader(rep.status)
	if err := json.NewEncoder(w).Encode(rep.body); err != nil {
		a.log.Debug("answer not written", "err", err)
	}
}

func (a *API) create(r *http.Request) (reply, error) {
	var req Request
	if err := decode(r.Body, &req, true); err != nil {
		return reply{}, err
	}
	b, created, err := a.service.Create(r.Context(), req)
	if err != nil {
		return reply{}, err
	}
	if created {
		return reply{http.StatusCreated, b}, nil
	}
	return reply{http.StatusOK, b}, nil
}

func (a *API) get(r *http.Request) (reply, error) {
	b, err := a.service.Get(r.Context(), r.PathValue("id"))
	if err != nil {
		return reply{}, err
	}
	mail, err := a.service.Mail(r.Context(), b)
	return reply{http.StatusOK, struct {
		Booking
		Mail *Mail `json:"mail,omitempty"`
	}{b, mail}}, err
}

// do answers with the booking and whether this request changed it.
func (a *API) do(op Op) func(*http.Request) (reply, error) {
	return func(r *http.Request) (reply, error) {
		var seen struct {
			Generation int `json:"generation"` // that the client has seen
		}
		if err := decode(r.Body, &seen, false); err != nil {
			return reply{}, err
		}
		if seen.Generation < 0 {
			return reply{}, &InvalidError{"generation", "must not be negative"}
		}
		b, changed, err := a.service.Do(r.Context(), op, r.PathValue("id"), seen.Generation)
		return reply{http.StatusOK, struct {
			Booking
			Changed bool `json:"changed"`
		}{b, changed}}, err
	}
}

// errTooLarge and malformed bodies are the client's.
var errTooLarge = fmt.Errorf("the body exceeds %d bytes", maxBody)

// decode reads exactly one JSON value. Unknown fields are ignored: clients may
// be newer than the server (A2-09). An empty body is an empty object unless it
// is needed.
func decode(body io.Reader, into any, needed bool) error {
	dec := json.NewDecoder(body)
	err := dec.Decode(into)
	if errors.Is(err, io.EOF) && !needed {
		return nil
	}
	if err == nil {
		if _, err = dec.Token(); errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = errors.New("more than one JSON value")
		}
	}
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return errTooLarge
	}
	return &InvalidError{"body", "is not usable JSON: " + err.Error()}
}

func (a *API) failure(r *http.Request, op string, err error) (reply, string) {
	status, code := classify(err)
	message := err.Error()
	if status >= http.StatusInternalServerError {
		a.log.ErrorContext(r.Context(), "request failed", "op", op, "booking", r.PathValue("id"), "code", code, "err", err)
		message = publicMessage(code) // what the database says is not the client's business
	}
	body := struct {
		Error struct {
			Code    string   `json:"code"`
			Message string   `json:"message"`
			Booking *Booking `json:"booking,omitempty"`
		} `json:"error"`
	}{}
	body.Error.Code, body.Error.Message = code, message
	var c *ConflictError
	if errors.As(err, &c) && c.Booking.ID != "" {
		body.Error.Booking = &c.Booking
	}
	return reply{status, body}, code
}

func classify(err error) (status int, code string) {
	var invalid *InvalidError
	var conflict *ConflictError
	switch {
	case errors.As(err, &invalid):
		return http.StatusBadRequest, "invalid"
	case errors.Is(err, errTooLarge):
		return http.StatusRequestEntityTooLarge, "too_large"
	case errors.Is(err, ErrNotFound):
		return http.StatusNotFound, "not_found"
	case errors.As(err, &conflict):
		return http.StatusConflict, "conflict"
	case errors.Is(err, ErrOutcomeUnknown):
		return http.StatusServiceUnavailable, "unknown"
	default:
		return http.StatusServiceUnavailable, "unavailable"
	}
}

func publicMessage(code string) string {
	if code == "unknown" {
		return ErrOutcomeUnknown.Error()
	}
	return "the booking database cannot be used now; nothing was done; repeat the request"
}
