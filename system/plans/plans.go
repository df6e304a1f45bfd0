// Package plans keeps the plans of prepared statements from depending on when
// they were made.
package plans

// Steady adds to the parameters of a Postgres session what a service needs whose
// statements all find their rows by an index (docs/statement-plans.md).
//
// A session keeps the plan of a statement that it has run a few times. One made
// while the table was small reads the whole table, and goes on doing so when a
// campaign has brought 50,000 rows, until the next ANALYZE, a minute later at best.
// Seen: a lane of 1,500 mails a second that did 180.
//
// jit: a plan that cannot but read a table counts as very dear with enable_seqscan
// off, and would be compiled before it reads ten rows.
func Steady(params map[string]string) {
	params["enable_seqscan"] = "off"
	params["jit"] = "off"
}
