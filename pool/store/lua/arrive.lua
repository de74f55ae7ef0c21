-- arrive: accept a job of a Program, or leave nothing behind. It goes to the Program's rank, or waits in the Program's pool.
-- KEY job hash the job record, no TTL until it ends
-- KEY index zset
-- KEY timers zset
-- KEY tombstone string
-- KEY tenants zset
-- KEY model hash
-- KEY program hash
-- KEY pool list
-- KEY gone string
-- KEYS blocks hash as in submit
-- ARG token str
-- ARG not_after ms
-- ARG cap choices the model may hold
-- ARG tenant str
-- ARG own_cap choices its tenant may hold, 0: they are not counted
-- ARG claimed flag
-- ARG remember ms
-- ARG n choices of this job
-- ARG queue_timeout ms
-- ARG deadline ms 0 for none
-- ARG reader ms 0 for none
-- ARG data list
-- ARG flow str
-- ARG terms str
-- ARG fields list name, value ... of the job record
-- ARG id str of the Program
-- ARG rank str that it is bound to, or will be
-- ARG elsewhere flag 1: another rank would be up
-- ARG priority num
-- ARG expected str output tokens, "" for unknown
-- ARG tokens num of the prompt, an estimate
-- ARG force ms after which it resumes by force, if it begins to wait now
-- ARG deadline_force ms the same for this request's own deadline, 0 for none
-- ARG most_programs num that its tenant may have, 0: any
-- ARG facts list name, value ... of the Program, from now on
-- ARG first list name, value ... of a Program that is new
-- INCLUDE clock hold own closed accept record book figures waiting place arrival
-- RETURN as submit, or {"many", at_ms, Programs its tenant has}, "ok" with where it went: {"ok", at_ms, dispatched | waiting, generation}
--   | {"moved", at_ms, rank} to be declared | {"stale", at_ms}: to be bound anew first
at.rank, at.ms = rank, now_ms()
local p = program_of(program, pool, gone, id)
if redis.call('EXISTS', job) == 0 and p.state then
  if p.rank ~= rank then return {'moved', at.ms, p.rank} end
  if must_move(at, p, elsewhere) then return {'stale', at.ms} end
end
local has = not p.state and most_programs > 0 and tonumber(redis.call('HGET', at.owners, tenant) or 0)
local refused = refusal(at.ms, has and has >= most_programs and has)
if refused then return refused end
arrived(at, p, facts, first, tokens)
fields[#fields + 1], fields[#fields + 2] = 'program', id
fields[#fields + 1], fields[#fields + 2] = 'generation', p.gen
local ticket = string.format('%s:%.0f:%.0f:%s', token, at.ms, priority, expected)
fields[#fields + 1], fields[#fields + 2] = 'ticket', ticket
-- Below zero: the sweep counts by scores above it what the model's own stream must hold.
enlist(-at.ms, at.ms, at.ms .. '000')
local where = place_job(at, p, ticket, job, force, deadline_force)
save(p)
changed(at)
return {'ok', at.ms, where, p.gen}
