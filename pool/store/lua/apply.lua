-- apply: carry out a plan for one rank, made on a version of its book that must still be the current one. Each operation
-- checks for itself what no plan may break: state, front request, number of Programs, KV there is.
-- KEYS records hash for each operation the Program's record, its pool, and the job in front (or any key)
-- ARG rank str
-- ARG version str
-- ARG most Programs active there, forced ones not counted
-- ARG capacity tokens 0: not bounded
-- ARG fresh ms that an observation counts
-- ARG more flag 1: the plan did not look at all there is
-- ARG ids list of Programs
-- ARG kinds list admit, force, pause or mark
-- ARG details list why; for admit and force, in front of it, the token of the request
-- ARG figures list "USED REQUIRED RESERVE" tokens that an admission was decided with, "" for others
-- INCLUDE clock record book figures waiting place plan
-- FLAGS allow-oom
-- RETURN {"ok", version, {Program, why it was refused} ...} | {"version", current} | {"away"}
at.rank, at.ms = rank, now_ms()
local book = redis.call('HMGET', at.book, 'version', 'incarnation')
if (book[1] or '0') ~= version then return {'version', book[1] or '0'} end
if not book[2] or book[2] == '' then return {'away'} end
local reply, current = {'ok', version}, tonumber(version)
local limits = {most = most, capacity = capacity, fresh = fresh, seat = book[2]}
for i, id in ipairs(ids) do
  local record, pool, job = unpack(records, 3 * i - 2, 3 * i)
  local p = program_of(record, pool, '', id)
  local why = operate(at, p, kinds[i], details[i], job, limits)
  if why then
    reply[#reply + 1] = {id, why}
    redis.call('ZADD', at.dirty, 'NX', at.ms, rank)
  else
    save(p)
    if figures[i] ~= '' then redis.call('HSET', at.book, 'admission', figures[i]) end
    current = redis.call('HINCRBY', at.book, 'version', 1)
  end
end
reply[2] = string.format('%.0f', current)
if #reply == 2 and more == 0 then redis.call('ZREM', at.dirty, rank) end
return reply
