package reconciler

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"mailproof/system/delivery"
)

// HTTPLog reads a delivery log that a provider, or a small program beside a mail
// server, gives out over HTTP:
//
//	GET <URL>?key=<dedupe key>&running=true
//
//	200, one JSON object per line: {"event":"stored","key":…,"session":…,"at":…,"message_id":…}
//	Log-Reach: for how many seconds back the log is complete
//
// The events are those of [Event]. Both fakes answer so at /log of their control
// API. A line {"error":…}, another status, a broken or an over-long answer and an
// answer whose end cannot be told from a lost connection are errors.
type HTTPLog struct {
	url       url.URL
	onePerTry bool
	client    *http.Client
}

var _ Log = (*HTTPLog)(nil)

// NewHTTPLog makes a reader of the log at addr. onePerTry as in [Page].
func NewHTTPLog(addr string, onePerTry bool) (*HTTPLog, error) {
	u, err := url.Parse(addr)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, errors.New("the delivery log must be http://… or https://…")
	}
	return &HTTPLog{url: *u, onePerTry: onePerTry, client: logClient()}, nil
}

// logClient follows no redirect: what another server says proves nothing.
func logClient() *http.Client {
	return &http.Client{
		Transport:     &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 1, IdleConnTimeout: 10 * time.Second},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// withoutURL keeps addresses out of logs.
func withoutURL(err error) error {
	var quoted *url.Error
	if errors.As(err, &quoted) {
		return quoted.Err
	}
	return err
}

// Close ends kept connections.
func (l *HTTPLog) Close() { l.client.CloseIdleConnections() }

// maxPage bounds an answer about one key.
const maxPage = 1 << 20

// Lookup asks for the row's key; ctx bounds it.
func (l *HTTPLog) Lookup(ctx context.Context, row delivery.Row) (Page, error) {
	u := l.url
	q := u.Query()
	q.Set("key", row.DedupeKey)
	q.Set("running", "true")
	u.RawQuery = q.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), http.NoBody)
	if err != nil {
		return Page{}, errors.New("request cannot be made") // the error quotes the URL
	}
	resp, err := l.client.Do(req)
	if err != nil {
		return Page{}, withoutURL(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return Page{}, fmt.Errorf("answered %s", resp.Status)
	}
	if resp.ProtoMajor == 1 && resp.ContentLength < 0 && len(resp.TransferEncoding) == 0 {
		return Page{}, errors.New("its answer ends with the connection: half of it could not be told from all")
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPage+1))
	switch {
	case err != nil:
		return Page{}, fmt.Errorf("read: %w", err)
	case len(body) > maxPage:
		return Page{}, fmt.Errorf("more than %d bytes about one key", maxPage)
	}
	p := Page{OnePerTry: l.onePerTry}
	if p.Lines, err = parseLines(body); err != nil {
		return Page{}, err
	}
	// Whole seconds, at most a year: a larger number is a mistake.
	if n, err := strconv.Atoi(resp.Header.Get("Log-Reach")); err == nil && n > 0 && n <= 366*24*3600 {
		p.Reach = time.Duration(n) * time.Second
	}
	return p, nil
}

type jsonLine struct {
	Event     string          `json:"event"`
	Key       string          `json:"key"`
	Session   json.RawMessage `json:"session"`
	At        json.RawMessage `json:"at"`
	MessageID string          `json:"message_id"`
	Error     string          `json:"error"`
}

func parseLines(body []byte) ([]Line, error) {
	var out []Line
	in := bufio.NewScanner(bytes.NewReader(body))
	in.Buffer(nil, maxPage+1)
	for n := 1; in.Scan(); n++ {
		if len(bytes.TrimSpace(in.Bytes())) == 0 {
			continue
		}
		var l jsonLine
		if err := json.Unmarshal(in.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("line %d is no JSON object: %w", n, err)
		}
		switch {
		case l.Error != "":
			return nil, fmt.Errorf("line %d: the log could not be read: %s", n, l.Error)
		case l.Event == "" || l.Key == "":
			return nil, fmt.Errorf("line %d has no event or no key", n)
		}
		out = append(out, Line{
			ID: string(l.Session) + " " + string(l.At), Key: l.Key, Event: Event(l.Event), ProviderID: l.MessageID,
		})
	}
	if err := in.Err(); err != nil {
		return nil, fmt.Errorf("read: %w", err)
	}
	return out, nil
}
