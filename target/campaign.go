package target

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"mailproof/history"
	"mailproof/system/contract"
)

// CampaignResult is what the mail service says of a call: Read mails were read,
// New of them have a row since, Known had one before.
type CampaignResult struct {
	Read  int `json:"read"`
	New   int `json:"new"`
	Known int `json:"known"`
}

// CampaignCounts is a campaign as the mail service counts it.
type CampaignCounts struct {
	Stopped bool  `json:"stopped"`
	Total   int64 `json:"total"`
	// Counts by state in lower case: pending, sending, sent, failed, unknown,
	// dead, cancelled, expired. A state without mails is left out.
	Counts        map[string]int64 `json:"counts"`
	FirstAccepted *time.Time       `json:"first_accepted"`
	LastAccepted  *time.Time       `json:"last_accepted"`
	FirstSent     *time.Time       `json:"first_sent"`
	LastSent      *time.Time       `json:"last_sent"`
}

// AtRest is how many mails need nobody any more.
func (c CampaignCounts) AtRest() int64 {
	return c.Counts["sent"] + c.Counts["dead"] + c.Counts["cancelled"] + c.Counts["expired"] + c.Counts["unknown"]
}

// CampaignRequest is one call for a campaign's mails.
type CampaignRequest struct {
	ID                   string
	SendAfter, ExpiresAt time.Time // zero: none
	Recipients           iter.Seq[string]
	// Process that is asked, "" for the first that listens.
	Process string
}

// Campaign asks the mail service for one marketing mail to each recipient, in
// one streamed call. It is repeated by the caller after an unknown outcome, with
// the same recipients: each gets one mail per campaign. history.OpFail means
// that no mail was accepted.
func (p *Pipeline) Campaign(ctx context.Context, id string, recipients []string) (CampaignResult, history.OpOutcome) {
	r, outcome, _ := p.CampaignWhy(ctx, CampaignRequest{ID: id, Recipients: slices.Values(recipients)})
	return r, outcome
}

// CampaignWhy is Campaign with all that can be asked for, and with the reason of
// an outcome other than ok.
func (p *Pipeline) CampaignWhy(ctx context.Context, c CampaignRequest) (CampaignResult, history.OpOutcome, error) {
	addr := p.mailService(c.Process)
	if addr == "" {
		return CampaignResult{}, history.OpFail, errors.New("no mail process listens")
	}
	body, writer := io.Pipe()
	written := make(chan struct{})
	go func() { defer close(written); _ = writer.CloseWithError(writeLines(writer, c)) }()
	defer func() { _ = body.Close(); <-written }() // ends the writer when the answer came early
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/campaigns/"+url.PathEscape(c.ID)+"/mails?"+c.query(), body)
	if err != nil {
		return CampaignResult{}, history.OpFail, fmt.Errorf("campaign %s: %w", c.ID, err)
	}
	req.Header.Set("Content-Type", "application/x-ndjson")
	resp, err := streaming().Do(req)
	if err != nil {
		outcome := history.OpUnknown
		if neverSent(err) {
			outcome = history.OpFail
		}
		return CampaignResult{}, outcome, fmt.Errorf("campaign %s: %w", c.ID, err)
	}
	defer func() { _ = resp.Body.Close() }() // only read
	return campaignAnswer(c.ID, resp)
}

func campaignAnswer(id string, resp *http.Response) (CampaignResult, history.OpOutcome, error) {
	var answer struct {
		CampaignResult
		Error string `json:"error"`
	}
	err := json.NewDecoder(resp.Body).Decode(&answer)
	switch {
	case err == nil && resp.StatusCode == http.StatusOK:
		return answer.CampaignResult, history.OpOK, nil
	case err == nil && answer.Error != "" && answer.Read == 0 && resp.StatusCode < 500:
		return answer.CampaignResult, history.OpFail, fmt.Errorf("campaign %s: %s: %s", id, resp.Status, answer.Error)
	default:
		return answer.CampaignResult, history.OpUnknown, fmt.Errorf("campaign %s: %s: %s", id, resp.Status, answer.Error)
	}
}

// streaming is a client without the time limit of a customer's request. Its
// answer may come before the body is written: a refused campaign.
func streaming() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
}

func (c CampaignRequest) query() string {
	q := url.Values{"template": {contract.TemplateOffer}}
	if !c.SendAfter.IsZero() {
		q.Set("send_after", c.SendAfter.Format(time.RFC3339Nano))
	}
	if !c.ExpiresAt.IsZero() {
		q.Set("expires_at", c.ExpiresAt.Format(time.RFC3339Nano))
	}
	return q.Encode()
}

func writeLines(w io.Writer, c CampaignRequest) error {
	out := bufio.NewWriterSize(w, 64<<10)
	enc := json.NewEncoder(out)
	for to := range c.Recipients {
		err := enc.Encode(map[string]any{"to": to, "data": contract.CampaignData{
			Headline: "Half price tonight for " + to, Text: "Two seats for the price of one.\n\nUntil midnight.", Link: "https://shop.example.test/" + c.ID,
		}})
		if err != nil {
			return err
		}
	}
	return out.Flush()
}

// StopCampaign sets the campaign's flag: what is not claimed yet is not sent.
func (p *Pipeline) StopCampaign(ctx context.Context, id string) history.OpOutcome {
	addr := p.mailService("")
	if addr == "" {
		return history.OpFail
	}
	resp, err := p.campaignCall(ctx, http.MethodDelete, addr, id)
	if err != nil {
		if neverSent(err) {
			return history.OpFail
		}
		return history.OpUnknown
	}
	defer func() { _ = resp.Body.Close() }() // the status says it
	if resp.StatusCode != http.StatusOK {
		return history.OpUnknown
	}
	return history.OpOK
}

// CampaignState counts the campaign's mails by state.
func (p *Pipeline) CampaignState(ctx context.Context, id string) (CampaignCounts, error) {
	var c CampaignCounts
	addr := p.mailService("")
	if addr == "" {
		return c, errors.New("no mail process listens")
	}
	resp, err := p.campaignCall(ctx, http.MethodGet, addr, id)
	if err != nil {
		return c, fmt.Errorf("campaign %s: %w", id, err)
	}
	defer func() { _ = resp.Body.Close() }() // only read
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // for the error alone
		return c, fmt.Errorf("campaign %s: %s: %s", id, resp.Status, text)
	}
	if err := json.NewDecoder(resp.Body).Decode(&c); err != nil {
		return c, fmt.Errorf("campaign %s: %w", id, err)
	}
	return c, nil
}

func (p *Pipeline) campaignCall(ctx context.Context, method, addr, id string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+addr+"/campaigns/"+url.PathEscape(id), nil)
	if err != nil {
		return nil, err
	}
	return streaming().Do(req)
}

// mailService is where a mail process listens: the named one, else the first.
func (p *Pipeline) mailService(process string) string {
	if process != "" {
		return p.Addr(process)
	}
	for _, prog := range p.programs {
		if strings.HasPrefix(prog.name, "notifyd") {
			if addr := prog.addr(); addr != "" {
				return addr
			}
		}
	}
	return ""
}

// CampaignKey is the dedupe key of one recipient's mail in a campaign.
func (*Pipeline) CampaignKey(id, recipient string) string { return contract.CampaignKey(id, recipient) }
