-- erase: forget an ended job at its owner's wish: record, log, and the input that the record holds. Its id answers as
-- one that never was, and no resend brings it back. Blocks of a large input may be shared with other records of its
-- tenant; they go when the last of those would have.
-- KEY job hash
-- KEY log list
-- KEY tombstone string
-- FLAGS allow-oom
-- RETURN {"ok"} | {"live", state} | {"gone"}
local seen = redis.call('HMGET', job, 'state', 'tombstone_ms')
if not seen[1] then return {'gone'} end
if seen[1] == 'queued' or seen[1] == 'running' then return {'live', seen[1]} end
local left_ms = math.max(redis.call('PTTL', job), 0)
redis.call('DEL', job, log)
redis.call('SET', tombstone, 'erased', 'PX', math.max(left_ms + tonumber(seen[2]), 1))
return {'ok'}
