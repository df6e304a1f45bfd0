package admin

import (
	"context"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"time"

	"mailproof/system/notify/campaign"
)

// Campaigns takes marketing campaigns in, shows and stops them.
type Campaigns interface {
	Send(ctx context.Context, r campaign.Request) (campaign.Receipt, error)
	Show(ctx context.Context, id string) (campaign.State, error)
	Stop(ctx context.Context, id string) error
}

// campaignRoutes are those of the marketing lane. The content type of the POST,
// and DELETE, are such that no web page can make a browser send them.
//
//	POST   /campaigns/{id}/mails?template=offer&expires_at=…&send_after=…
//	       body: JSON lines {"to":"a@x","data":{…}} → {"campaign","read","new","known"}
//	GET    /campaigns/{id}
//	DELETE /campaigns/{id}
func (s *Server) campaignRoutes(mux *http.ServeMux) {
	mux.HandleFunc("POST /campaigns/{id}/mails", s.sendCampaign)
	mux.HandleFunc("GET /campaigns/{id}", s.showCampaign)
	mux.HandleFunc("DELETE /campaigns/{id}", s.stopCampaign)
}

// jsonLines is the content type of a campaign's body.
const jsonLines = "application/x-ndjson"

// partial is the answer to a call that was taken in as far as it went.
type partial struct {
	Error string `json:"error"`
	Line  int    `json:"line,omitempty"` // the one that is at fault
	campaign.Receipt
}

func (s *Server) sendCampaign(w http.ResponseWriter, r *http.Request) {
	req, err := campaignRequest(r)
	if err != nil {
		s.answer(w, http.StatusBadRequest, partial{Error: err.Error(), Receipt: campaign.Receipt{Campaign: req.ID}})
		return
	}
	receipt, err := s.cfg.Campaigns.Send(r.Context(), req)
	if err == nil {
		s.answer(w, http.StatusOK, receipt)
		return
	}
	status, text := s.campaignFailure(err)
	out := partial{Error: text, Receipt: receipt}
	var bad *campaign.LineError
	if errors.As(err, &bad) {
		out.Line = bad.Line
	}
	s.answer(w, status, out)
}

func campaignRequest(r *http.Request) (campaign.Request, error) {
	req := campaign.Request{ID: r.PathValue("id"), Lines: r.Body}
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != jsonLines {
		return req, errors.New("Content-Type must be " + jsonLines)
	}
	q := r.URL.Query()
	for name := range q {
		switch name {
		case "template", "expires_at", "send_after":
		default:
			return req, fmt.Errorf("parameter %q is not known, there are template, expires_at and send_after", name)
		}
	}
	req.Template = q.Get("template")
	if req.ExpiresAt, err = moment(q, "expires_at"); err != nil {
		return req, err
	}
	req.SendAfter, err = moment(q, "send_after")
	return req, err
}

// moment reads a parameter that may be missing.
func moment(q url.Values, name string) (*time.Time, error) {
	text := q.Get(name)
	if text == "" {
		return nil, nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return nil, fmt.Errorf("%s: %q is no time such as 2026-12-24T18:00:00Z (RFC 3339)", name, text)
	}
	return &at, nil
}

func (s *Server) showCampaign(w http.ResponseWriter, r *http.Request) {
	state, err := s.cfg.Campaigns.Show(r.Context(), r.PathValue("id"))
	if err != nil {
		s.refuseCampaign(w, err)
		return
	}
	s.answer(w, http.StatusOK, state)
}

func (s *Server) stopCampaign(w http.ResponseWriter, r *http.Request) {
	err := s.cfg.Campaigns.Stop(r.Context(), r.PathValue("id"))
	if err != nil {
		s.refuseCampaign(w, err)
		return
	}
	s.showCampaign(w, r)
}

func (s *Server) refuseCampaign(w http.ResponseWriter, err error) {
	status, text := s.campaignFailure(err)
	s.answer(w, status, map[string]string{"error": text})
}

func (s *Server) campaignFailure(err error) (int, string) {
	var bad *campaign.LineError
	switch {
	case errors.Is(err, campaign.ErrInvalid), errors.Is(err, campaign.ErrBody), errors.As(err, &bad):
		return http.StatusBadRequest, err.Error()
	case errors.Is(err, campaign.ErrStopped):
		return http.StatusConflict, err.Error()
	}
	s.cfg.Log.Warn("request about a campaign failed", "error", err)
	return http.StatusServiceUnavailable, "the database or the broker did not answer in time; repeat the request: who has a mail of this campaign gets no second one, for as long as its row is kept (NOTIFYD_RETENTION)"
}
