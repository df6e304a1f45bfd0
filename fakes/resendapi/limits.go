package resendapi

import (
	"net/http"
	"strconv"
	"sync"
	"time"
)

// limits counts requests per second and mails per day and month.
type limits struct {
	rate, daily, monthly int

	mu         sync.Mutex
	windows    map[string]window // per API key
	day, month string
	usedDay    int
	usedMonth  int
}

type window struct {
	from time.Duration
	n    int
}

func newLimits(opt Options) *limits {
	return &limits{rate: opt.RateLimit, daily: opt.DailyQuota, monthly: opt.MonthlyQuota, windows: map[string]window{}}
}

// windowsKept bounds the API keys that are counted: beyond it all begin anew.
const windowsKept = 4096

// allow counts one request of an API key in its window of a second and writes
// the headers that tell of it.
func (l *limits) allow(h http.Header, key string, now time.Duration) *APIError {
	if l.rate <= 0 {
		return nil
	}
	l.mu.Lock()
	w := l.windows[key]
	if now-w.from >= time.Second || w.n == 0 {
		w = window{from: now}
	}
	w.n++
	if len(l.windows) >= windowsKept {
		clear(l.windows)
	}
	l.windows[key] = w
	l.mu.Unlock()
	// As recorded from the live service: draft 06 of the IETF's RateLimit
	// fields, in lower case, the reset in whole seconds.
	h["ratelimit-limit"] = []string{strconv.Itoa(l.rate)}
	h["ratelimit-policy"] = []string{strconv.Itoa(l.rate) + ";w=1"}
	h["ratelimit-remaining"] = []string{strconv.Itoa(max(0, l.rate-w.n))}
	h["ratelimit-reset"] = []string{"1"}
	if w.n <= l.rate {
		return nil
	}
	h["retry-after"] = []string{"1"}
	return must(429, "rate_limit_exceeded")
}

// quota counts mails, if they fit, and writes the headers, which tell what is
// used. Each recipient counts.
func (l *limits) quota(h http.Header, n int, now time.Time) *APIError {
	if l.daily <= 0 && l.monthly <= 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now = now.UTC()
	if d := now.Format(time.DateOnly); d != l.day {
		l.day, l.usedDay = d, 0
	}
	if m := now.Format("2006-01"); m != l.month {
		l.month, l.usedMonth = m, 0
	}
	var err *APIError
	switch {
	case l.daily > 0 && l.usedDay+n > l.daily:
		err = must(429, "daily_quota_exceeded")
	case l.monthly > 0 && l.usedMonth+n > l.monthly:
		err = must(429, "monthly_quota_exceeded")
	default:
		l.usedDay += n
		l.usedMonth += n
	}
	if l.daily > 0 {
		h["x-resend-daily-quota"] = []string{strconv.Itoa(l.usedDay)}
	}
	h["x-resend-monthly-quota"] = []string{strconv.Itoa(l.usedMonth)}
	return err
}

func (l *limits) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.windows)
	l.usedDay, l.usedMonth = 0, 0
}
